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

from twostroke.ids import PageId
from twostroke.kv_cache.form import Conversion
from twostroke.kv_cache.memory import PageMemory, Pages, Window
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport, digest
from twostroke.transfer.copy_threads import CopyThreads, off_loop


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
        self._originals = originals
        self._known: dict[PageId, _Converted] = {}
        self._window = originals.window(1)
        self._thread = CopyThreads("pages-convert", [self._window])

    async def open(self, identity: Identity) -> None:
        """Let workers read the converted pages that show their identity, which is `identity`'s fingerprint."""
        for transport in self.transports:
            self.endpoints.append(await transport.open(self._memory, identity))

    async def of(self, pages: Sequence[PageId]) -> list[tuple[int, bytes]]:
        """Return (generation, digest) of the converted pages; the originals are filled and pinned until this returns.

        A caller that is cancelled leaves the conversion to others that wait for it.
        """
        results = [self._converted(page) for page in pages]
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
        import torch  # which workers of paced models do without

        from twostroke.kernels.page_conversion import convert_page

        started_s = time.perf_counter()
        self._memory.begin_new_generation(page)
        target = self._memory.page(page)
        (original,) = next(window.read([[page]]))
        with torch.inference_mode():
            source = torch.from_numpy(np.frombuffer(original, np.uint8))
            convert_page(self._conversion, source, torch.from_numpy(target))
        result = self._memory.generation(page), digest(target)
        self.seconds += time.perf_counter() - started_s
        self.pages += 1
        return result


def _has_failed(result: asyncio.Future[tuple[int, bytes]]) -> bool:
    return result.done() and (result.cancelled() or result.exception() is not None)
