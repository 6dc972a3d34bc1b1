"""The host tier: copies of evicted pages in host memory. From there they go on to disk where there is one."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.host_store import HostEntry, HostStore
from twostroke.transfer.base import digest
from twostroke.worker.measured.page_time import PageTime
from twostroke.worker.tiers.copies.copy_target import CopyTarget
from twostroke.worker.tiers.disk_tier import DiskTier
from twostroke.worker.tiers.disk_writer import PageWrite
from twostroke.worker.tiers.metrics import TierChanges, TierUse
from twostroke.worker.tiers.reader import DamagedPage, PageRead, TierReaders

log = logging.getLogger(__name__)


class HostTier:
    """The memory of the tier, and the blocks in it. A host tier that was turned off has a store without pages."""

    tier = Tier.HOST

    def __init__(
        self,
        memory: PageMemory,
        readers: TierReaders[HostEntry],
        changes: TierChanges,
        below: DiskTier | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.readers = readers
        self.store = HostStore(memory.pages)
        self.access = memory.access(1)
        """The tier's pages, for the one job at a time that reads from disk to these."""
        self._memory = memory
        self._changes = changes
        self._below = below
        self._clock = clock

    @classmethod
    def of(cls, memory: PageMemory, pool_memory: Pages, changes: TierChanges, below: DiskTier | None) -> HostTier:
        """Starts the threads that read from this memory."""
        fetcher = functools.partial(HostFetcher, memory)
        return cls(memory, TierReaders.of("tier-host", fetcher, pool_memory, _time_of_a_copy(memory)), changes, below)

    @property
    def room(self) -> int:
        """Blocks that it can take at once."""
        return self.store.pages

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self.store)

    def use(self) -> TierUse:
        page_bytes, blocks = self._memory.page_bytes, len(self.store)
        return TierUse(blocks * page_bytes, self.store.pages * page_bytes, blocks, self.readers.page_time.seconds)

    def find(self, block_hash: BlockHash) -> HostEntry | None:
        return self.store.get(block_hash)

    def keeps(self, block_hash: BlockHash) -> bool:
        """Returns whether a block is here, and makes it the last one to leave."""
        is_here = block_hash in self.store
        if is_here:
            self.store.touch(block_hash)
        return is_here

    def hit(self, block_hash: BlockHash) -> None:
        """Notes that a page that was loaded was used: it is the last one to leave."""
        self.keeps(block_hash)

    def hold(self, places: Sequence[HostEntry]) -> Callable[[], None]:
        """Keeps these pages until the returned function is called."""
        store, entries = self.store, list(places)
        for entry in entries:
            store.hold(entry)

        def release() -> None:
            for entry in entries:
                store.release(entry)

        return release

    def data(self, entry: HostEntry) -> memoryview:
        """Returns the bytes of a page; the caller holds the entry."""
        return self._memory.page(entry.page).data

    def take_page(self) -> PageId | None:
        """Takes a page for a new block, and evicts one if needed; returns None if all are held."""
        victim = self.store.victim()
        if victim is not None:
            self._evict(victim)
        return self.store.take()

    def give_back(self, page: PageId) -> None:
        """Frees a page that was taken and not used."""
        if self.store.pages:
            self.store.give_back(page)

    def target(self, block_hash: BlockHash, parent: BlockHash) -> CopyTarget | None:
        """Takes a page to copy a block into; returns None if all are held."""
        store, own = self.store, self.take_page()
        if own is None:
            self._changes.metrics.skipped(Tier.HOST, "busy")
            return None

        def commit(known: bytes) -> None:
            if store is self.store and block_hash not in store:
                self._keep(HostEntry(block_hash, parent, own, known, self._clock()))
            else:
                store.give_back(own)

        return CopyTarget(self._memory.page(own), commit, functools.partial(store.give_back, own))

    def promoted(self, block_hash: BlockHash, parent: BlockHash, page: PageId) -> bool:
        """Keeps a block whose bytes were read into a page that was taken; returns False if it is not to be kept."""
        if block_hash in self.store or not self.store.pages:
            return False
        self._keep(HostEntry(block_hash, parent, page, digest(self._memory.page(page)), self._clock()))
        return True

    def drop(self, block_hash: BlockHash) -> bool:
        return self.store.remove(block_hash) is not None

    def forget_all(self) -> list[BlockHash]:
        blocks = list(self.store)
        for block_hash in blocks:
            self.store.remove(block_hash)
        return blocks

    def turn_off(self, reason: str) -> list[BlockHash]:
        log.warning("host tier turned off reason=%s", reason)
        blocks, self.store = list(self.store), HostStore(0)
        return blocks

    async def wait_idle(self) -> None:
        """Returns at once: pages are copied to memory without waiting."""

    def close(self) -> None:
        self.readers.close()
        self.access.close()
        self._memory.close()

    def _keep(self, entry: HostEntry) -> None:
        """Announces a page that has come here, and has it written to disk from here if the disk takes it."""
        store = self.store
        store.put(entry)
        self._changes.wrote(Tier.HOST, entry.block_hash, self._memory.page_bytes)
        if self._below is not None and self._below.admit(entry.block_hash):
            store.hold(entry)
            done = functools.partial(store.release, entry)
            self._below.write(PageWrite(entry.block_hash, entry.parent, self.data(entry), entry.digest, done))

    def _evict(self, entry: HostEntry) -> None:
        """Frees the page of an entry, after copying it to disk if the disk takes it."""
        target = None if self._below is None else self._below.target(entry.block_hash, entry.parent)
        if target is not None:
            target.data.data[:] = self.data(entry)
            target.commit(entry.digest)
        self.store.remove(entry.block_hash)
        self._changes.aged(Tier.HOST, entry.block_hash, self._clock() - entry.since_s)


class HostFetcher:
    """Checks pages of host memory where they lie."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory

    def fetch(self, read: PageRead[HostEntry]) -> memoryview:
        data = self._memory.page(read.place.page).data
        if digest(data) != read.place.digest:
            raise DamagedPage(f"block {read.block_hash.hex()} changed in host memory")
        return data

    def close(self) -> None:
        """Closes nothing: the tier owns the memory, and closes it."""


def _time_of_a_copy(memory: PageMemory) -> PageTime:
    """Measures a copy and a digest within the memory."""
    scratch, started_s = memory.page(memory.scratch), time.perf_counter()
    memory.page(PageId(0))[:] = scratch
    digest(scratch)
    return PageTime(time.perf_counter() - started_s)
