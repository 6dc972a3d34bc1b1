"""Checksums of a worker's own pages, taken on a thread: pages may be large, or lie on a device."""

from __future__ import annotations

import asyncio
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
        self._memory = memory
        self._reading: tuple[Window, Lanes[Window]] | None = None

    async def of(self, pages: Sequence[PageId]) -> list[bytes]:
        """The digests of pages that nobody writes to meanwhile."""
        memory = self._memory
        if isinstance(memory, PageMemory) and len(pages) * memory.page_bytes <= _AT_ONCE_BYTES:
            return [digest(memory.page(page)) for page in pages]
        if self._reading is None:
            window = memory.window(1)
            self._reading = window, Lanes("pages-digest", [window])
        digests: Future[list[bytes]] = Future()
        self._reading[1].submit(lambda window: _digests(window, pages), digests)
        return await asyncio.wrap_future(digests)

    async def close(self) -> None:
        """Before the memory is closed. Whoever still waits gets an answer."""
        if self._reading is not None:
            window, lanes = self._reading
            await off_loop(lanes.close)
            window.close()


def _digests(window: Window, pages: Sequence[PageId]) -> list[bytes]:
    return [digest(views[0]) for views in window.read([page] for page in pages)]
