"""The owner's end of one TCP page connection: admit the reader, then answer its requests from pool memory."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.errors import InvalidRequest
from twostroke.kv_cache.memory import Pages, Window
from twostroke.transfer.connection import MAX_PAGES
from twostroke.transfer.frames import Deadline, check_fields, receive_frame, send, send_frame
from twostroke.transfer.hello import Gate

HELLO_S = 5.0
"""Within this time a new connection must have said who it is."""
MAX_REQUEST_S = 600.0
"""No answer takes longer: after that a reader that does not read loses its connection."""
REQUEST_LIMIT_BYTES = MAX_PAGES * 12 + 64
BATCH_BYTES = 512 << 10
"""Pages between two status bytes: small pages share system calls, and what is being copied stays in the CPU's cache
(6 GB/s over loopback where 2 MiB gave 5)."""
KEPT, CHANGED = b"\0", b"\1"

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A reader whose machine has vanished is forgotten after a minute."""


def batch_pages(page_bytes: int) -> int:
    return max(1, BATCH_BYTES // page_bytes)


def serve_pages(sock: socket.socket, gate: Gate, memory: Pages) -> None:
    """Returns only by an exception: EOFError when the reader hangs up, InvalidRequest for garbage, ..."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    gate.admit(sock, Deadline.after(HELLO_S))
    with contextlib.closing(memory.window(batch_pages(memory.page_bytes))) as window:
        while True:
            request = _read_request(receive_frame(sock, REQUEST_LIMIT_BYTES, None), memory)
            _answer(sock, request, memory, window)


@dataclass(frozen=True, slots=True)
class _Request:
    deadline: Deadline
    pages: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]
    """Which the reader expects, page by page."""

    def changed(self, start: int, stop: int, memory: Pages) -> str:
        """Why pages start..stop are not what the reader asked for; empty if they are."""
        pages, expected = self.pages[start:stop], self.generations[start:stop]
        actual = memory.generations[pages]
        wrong = np.flatnonzero(actual != expected)
        if not wrong.size:
            return ""
        first = wrong[0]
        return f"page {pages[first]} has generation {actual[first]}, generation {expected[first]} was asked for"


def _read_request(fields: list[Any], memory: Pages) -> _Request:
    check_fields(fields, (float, bytes, bytes))
    seconds, page_ids, generation_counts = fields
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(f"a request has {seconds} seconds left")
    if len(page_ids) % 4 or len(page_ids) * 2 != len(generation_counts):
        raise InvalidRequest(f"{len(page_ids)} bytes of page ids with {len(generation_counts)} of generations")
    pages = np.frombuffer(page_ids, "<u4").astype(np.uint32)
    if not 0 < pages.size <= MAX_PAGES or int(pages.max()) >= memory.pages:
        raise InvalidRequest(f"a request wants pages out of bounds, or not 1 to {MAX_PAGES} of them")
    generations = np.frombuffer(generation_counts, "<u8").astype(np.uint64)
    return _Request(Deadline.after(min(seconds, MAX_REQUEST_S)), pages, generations)


def _answer(sock: socket.socket, request: _Request, memory: Pages, window: Window) -> None:
    """Send the pages; generations are looked at before a batch is sent and after its last byte was."""
    step, count = batch_pages(memory.page_bytes), len(request.pages)
    pages = request.pages.tolist()
    batches = window.read(pages[start : start + step] for start in range(0, count, step))
    sent_from = 0
    for start in [*range(0, count, step), count]:
        views = next(batches, [])
        stop = min(start + step, count)
        if reason := request.changed(sent_from, stop, memory):
            send(sock, [CHANGED], request.deadline)
            send_frame(sock, [reason], request.deadline)
            return
        send(sock, [KEPT, *views], request.deadline)
        sent_from = start
