"""Checksums of a worker's own pages, taken on a thread: pages may be large, or lie on a device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future

from twostroke.ids import PageId
from twostroke.kv_cache.memory import PageMemory, Pages, Window
from twostroke.transfer.base import digest
from twostroke.transfer.threads import Lanes, off_loop

_AT_ONCE_BYTES = 256 << 10
"""Of host memory: as much is read in less time than a thread needs to be woken and to answer."""


class PageDigests:
    """Called from one event loop. A worker of small pages never starts the thread."""

    def __init__(self, memory: Pages) -> None:
        self.seconds = 0.0
        """Spent so far, on whichever thread; of a device's pages, their copies to the host included."""
        self.bytes = 0
        self._memory = memory
        self._reading: tuple[Window, Lanes[Window]] | None = None

    async def of(self, pages: Sequence[PageId]) -> list[bytes]:
        """The digests of pages that nobody writes to meanwhile."""
        memory = self._memory
        self.bytes += len(pages) * memory.page_bytes
        if isinstance(memory, PageMemory) and len(pages) * memory.page_bytes <= _AT_ONCE_BYTES:
            started_s = time.perf_counter()
            digests_now = [digest(memory.page(page)) for page in pages]
            self.seconds += time.perf_counter() - started_s
            return digests_now
        if self._reading is None:
            window = memory.window(1)
            self._reading = window, Lanes("pages-digest", [window])
        digests: Future[tuple[list[bytes], float]] = Future()
        self._reading[1].submit(lambda window: _timed_digests(window, pages), digests)
        found, seconds = await asyncio.wrap_future(digests)
        self.seconds += seconds
        return found

    async def close(self) -> None:
        """Before the memory is closed. Whoever still waits gets an answer."""
        if self._reading is not None:
            window, lanes = self._reading
            await off_loop(lanes.close)
            window.close()


def _timed_digests(window: Window, pages: Sequence[PageId]) -> tuple[list[bytes], float]:
    started_s = time.perf_counter()
    digests = [digest(views[0]) for views in window.read([page] for page in pages)]
    return digests, time.perf_counter() - started_s
