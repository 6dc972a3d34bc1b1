"""The host tier: copies of evicted pages in host memory."""

from __future__ import annotations

import time

from twostroke.base.ids import PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.tiers.host_store import HostEntry, HostStore
from twostroke.transfer.base import digest
from twostroke.worker.measured.page_time import PageTime
from twostroke.worker.tiers.reader import DamagedPage, PageRead


class HostTier:
    """Memory, what lies in it, and how long a page of it takes."""

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
        """Returns the bytes of a page; the caller holds the entry."""
        return self.memory.page(entry.page).data

    def close(self) -> None:
        self.memory.close()


class HostFetcher:
    """Checks pages of host memory where they lie."""

    def __init__(self, host: HostTier) -> None:
        self._host = host

    def fetch(self, read: PageRead[HostEntry]) -> memoryview:
        data = self._host.data(read.place)
        if digest(data) != read.place.digest:
            raise DamagedPage(f"block {read.block_hash.hex()} changed in host memory")
        return data

    def close(self) -> None:
        """The memory is the tier's."""


def _time_of_a_copy(memory: PageMemory) -> PageTime:
    """Measures a copy and a digest within the memory."""
    scratch, started_s = memory.page(memory.scratch), time.perf_counter()
    memory.page(PageId(0))[:] = scratch
    digest(scratch)
    return PageTime(time.perf_counter() - started_s)
