"""The host tier: copies of evicted pages in host memory."""

from __future__ import annotations

import time

from twostroke.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.tiers.host_store import HostEntry, HostStore
from twostroke.transfer.base import digest
from twostroke.worker.tiers.price import PageTime


class HostTier:
    """Pages are copied in on the event loop, just before the pool gives their memory away."""

    def __init__(self, memory: PageMemory) -> None:
        self.memory = memory
        self.store = HostStore(memory.pages)
        self.page_time = _time_of_a_copy(memory)

    @property
    def used_bytes(self) -> int:
        return len(self.store) * self.memory.page_bytes

    @property
    def most_bytes(self) -> int:
        return self.memory.pages * self.memory.page_bytes

    def data(self, entry: HostEntry) -> memoryview:
        """Return the bytes of a page; the caller holds the entry."""
        return self.memory.page(entry.page).data

    def put(self, data: memoryview, block_hash: BlockHash, parent: BlockHash) -> HostEntry | None:
        """Copy a page in; return None if there is no free page."""
        own = self.store.take()
        if own is None:
            return None
        page = self.memory.page(own)
        page.data[:] = data
        entry = HostEntry(block_hash, parent, own, digest(page), time.monotonic())
        self.store.put(entry)
        return entry

    def close(self) -> None:
        self.memory.close()


def _time_of_a_copy(memory: PageMemory) -> PageTime:
    """Measure a copy and a digest within the memory."""
    scratch, started_s = memory.page(memory.scratch), time.perf_counter()
    memory.page(PageId(0))[:] = scratch
    digest(scratch)
    return PageTime(time.perf_counter() - started_s)
