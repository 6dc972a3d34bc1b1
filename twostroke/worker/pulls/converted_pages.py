"""The pages of a worker in the form of the workers that pull them: converted and digested on a thread when asked for.

A page is converted once for all pulls, into the page of the same number of a memory of its own. So a converted page is
there as long as its original is pinned, no pull waits for a free one, and readers see a generation change as ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.ids import PageId
from twostroke.kv_cache.form import Conversion
from twostroke.kv_cache.memory import PageMemory, Pages, Window
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport, digest
from twostroke.transfer.copy_threads import CopyThreads, off_loop
from twostroke.worker.tiers.price import PageTime

TRIALS = 4
"""Conversions that are timed before a worker has converted a page that somebody wants."""
Numbers = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Converted:
    original: int
    """The generation of the page that it was made of."""
    result: asyncio.Future[tuple[int, bytes]]
    """Its own generation and digest."""


class ConvertedPages:
    """Converts pages for one event loop; a worker whose peers have its own form has none of these."""

    def __init__(self, originals: Pages, conversion: Conversion, transports: Sequence[PageTransport]) -> None:
        """`transports` are not open yet, and serve nothing but the converted pages."""
        self.form = conversion.target
        self.endpoints: list[PageEndpoint] = []
        self._conversion = conversion
        self._memory = PageMemory(originals.pages, conversion.page_bytes)
        self.transports = transports
        self.seconds = 0.0
        """Time spent so far, copies of device pages to the host included."""
        self.pages = 0
        """Pages converted so far."""
        self.served = 0
        """Pages that pulls were told of so far, each as often as it was."""
        self._originals = originals
        self._known: dict[PageId, _Converted] = {}
        self._page_time = PageTime(time_of_a_conversion(conversion, originals.page_bytes))
        self._window = originals.window(1)
        self._thread = CopyThreads("pages-convert", [self._window])

    @property
    def page_s(self) -> float:
        """Seconds per page: measured before the first one, and by each one since."""
        return self._page_time.seconds

    @property
    def served_bytes(self) -> tuple[int, int]:
        """The bytes of all pages that pulls were told of, as they lie here and as they were sent."""
        return self.served * self._originals.page_bytes, self.served * self._memory.page_bytes

    async def open(self, identity: Identity) -> None:
        """Let workers read the converted pages that show their identity, which is `identity`'s fingerprint."""
        for transport in self.transports:
            self.endpoints.append(await transport.open(self._memory, identity))

    async def of(self, pages: Sequence[PageId]) -> list[tuple[int, bytes]]:
        """Return (generation, digest) of the converted pages; the originals are filled and pinned until this returns.

        A caller that is cancelled leaves the conversion to others that wait for it.
        """
        results = [self._converted(page) for page in pages]
        self.served += len(pages)
        return [await asyncio.shield(result) for result in results]

    async def close(self) -> None:
        """Hang up, finish open conversions and end the thread; call it before the originals' memory is closed."""
        for transport in self.transports:
            await transport.close()
        await off_loop(self._thread.close)
        self._window.close()
        self._memory.close()

    def _converted(self, page: PageId) -> asyncio.Future[tuple[int, bytes]]:
        generation, known = self._originals.generation(page), self._known.get(page)
        if known is None or known.original != generation or _has_failed(known.result):
            job: Future[tuple[int, bytes]] = Future()
            self._thread.submit(lambda window: self._convert(window, page), job)
            known = self._known[page] = _Converted(generation, asyncio.wrap_future(job))
        return known.result

    def _convert(self, window: Window, page: PageId) -> tuple[int, bytes]:
        started_s = time.perf_counter()
        self._memory.begin_new_generation(page)
        target = self._memory.page(page)
        (original,) = next(window.read([[page]]))
        found = _convert_into(target, np.frombuffer(original, np.uint8), self._conversion)
        seconds = time.perf_counter() - started_s
        self.seconds += seconds
        self.pages += 1
        self._page_time = self._page_time.after(seconds, 1)
        return self._memory.generation(page), found


def _has_failed(result: asyncio.Future[tuple[int, bytes]]) -> bool:
    return result.done() and (result.cancelled() or result.exception() is not None)


def _convert_into(target: Numbers, original: Numbers, conversion: Conversion) -> bytes:
    """Fill the target page, and return its digest."""
    import torch  # which workers of paced models do without

    from twostroke.kernels.page_conversion import convert_page

    with torch.inference_mode():
        convert_page(conversion, torch.from_numpy(original), torch.from_numpy(target))
    return digest(target)


def time_of_a_conversion(conversion: Conversion, page_bytes: int) -> float:
    """Return the seconds of the quickest of some conversions: the first one also loads code."""
    original, target = np.zeros(page_bytes, np.uint8), np.zeros(conversion.page_bytes, np.uint8)
    seconds = []
    for _ in range(TRIALS):
        started_s = time.perf_counter()
        _convert_into(target, original, conversion)
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)
