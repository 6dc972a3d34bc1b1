"""Digests of a worker's own pages, taken on a thread because pages may be large or lie on a device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future

from twostroke.base.ids import PageId
from twostroke.kv_cache.memory import PageAccess, PageMemory, Pages
from twostroke.transfer.base import digest
from twostroke.transfer.copy_threads import CopyThreads, off_loop

_AT_ONCE_BYTES = 256 << 10
"""Bytes of host memory that are read faster than a thread is woken."""


class PageDigests:
    """Digests pages for one event loop. A worker with small pages never starts the thread."""

    def __init__(self, memory: Pages) -> None:
        self.seconds = 0.0
        """Time spent so far, copies of device pages to the host included."""
        self.bytes = 0
        self._memory = memory
        self._reading: tuple[PageAccess, CopyThreads[PageAccess]] | None = None

    async def of(self, pages: Sequence[PageId]) -> list[bytes]:
        """Returns the digests of pages. No writer may change them meanwhile."""
        memory = self._memory
        read_bytes = memory.layout.bytes_of(pages)
        self.bytes += read_bytes
        if isinstance(memory, PageMemory) and read_bytes <= _AT_ONCE_BYTES:
            started_s = time.perf_counter()
            digests_now = [digest(memory.page(page)) for page in pages]
            self.seconds += time.perf_counter() - started_s
            return digests_now
        if self._reading is None:
            access = memory.access(1)
            self._reading = access, CopyThreads("pages-digest", [access])
        digests: Future[tuple[list[bytes], float]] = Future()
        self._reading[1].submit(lambda access: _timed_digests(access, pages), digests)
        found, seconds = await asyncio.wrap_future(digests)
        self.seconds += seconds
        return found

    async def close(self) -> None:
        """Finishes open digests and ends the thread; call it before the memory is closed."""
        if self._reading is not None:
            access, threads = self._reading
            await off_loop(threads.close)
            access.close()


def _timed_digests(access: PageAccess, pages: Sequence[PageId]) -> tuple[list[bytes], float]:
    started_s = time.perf_counter()
    digests = [digest(views[0]) for views in access.read([page] for page in pages)]
    return digests, time.perf_counter() - started_s
