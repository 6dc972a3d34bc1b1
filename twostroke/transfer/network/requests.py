"""Requests of a reader to an owner over a socket, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.base.errors import InvalidRequest
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.network.connection import MAX_PAGES
from twostroke.transfer.sockets.frames import Deadline

MAX_REQUEST_S = 600.0
"""Most seconds that an answer may take: then a reader that has stopped reading loses its connection."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    deadline: Deadline
    pages: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]
    """Generations that the reader expects, page by page."""

    def changed(self, start: int, stop: int, memory: Pages) -> str:
        """Returns why pages start..stop are not what the reader asked for; empty if they are."""
        pages, expected = self.pages[start:stop], self.generations[start:stop]
        actual = memory.generations[pages]
        wrong = np.flatnonzero(actual != expected)
        if not wrong.size:
            return ""
        first = wrong[0]
        return f"page {pages[first]} has generation {actual[first]}, not {expected[first]}"


def read_request(seconds: float, page_ids: bytes, generations: bytes, memory: Pages) -> PageRequest:
    """Parses and checks a reader's request. Raises InvalidRequest."""
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(f"a request has {seconds} seconds left")
    if len(page_ids) * 2 != len(generations):
        raise InvalidRequest(f"{len(page_ids)} bytes of page ids with {len(generations)} of generations")
    pages = read_pages(page_ids, memory.pages)
    counts = np.frombuffer(generations, "<u8").astype(np.uint64)
    return PageRequest(Deadline.after(min(seconds, MAX_REQUEST_S)), pages, counts)


def read_pages(page_ids: bytes, limit: int) -> npt.NDArray[np.uint32]:
    """Reads 1 to MAX_PAGES u32 page ids below `limit`. Raises InvalidRequest."""
    if len(page_ids) % 4:
        raise InvalidRequest(f"{len(page_ids)} bytes of page ids")
    pages = np.frombuffer(page_ids, "<u4").astype(np.uint32)
    if not 0 < pages.size <= MAX_PAGES or int(pages.max()) >= limit:
        raise InvalidRequest(f"a request wants pages out of bounds, or not 1 to {MAX_PAGES} of them")
    return pages
