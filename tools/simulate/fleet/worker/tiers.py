"""The tiers below a simulated worker's pages: the live stores, budget and loads in virtual time, without any bytes.

What is kept where is as in `twostroke.worker.tiers.page_tiers`: evicted pages go to host memory, or to disk within the
budget of written bytes; reused ones go to disk. Loads and prefetch are the live ones (`twostroke.worker.tiers`).
Simulated are the threads that read and the one that writes, which take their time page by page.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.worker.interfaces import WorkerParts
from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageAccess
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.byte_budget import WriteBudget
from twostroke.kv_cache.tiers.disk_store import DiskStore, ReclaimedRecord, RecordPlace
from twostroke.kv_cache.tiers.host_store import HostEntry, HostStore
from twostroke.kv_cache.tiers.record import RecordFormat
from twostroke.kv_cache.tiers.sightings import Sightings
from twostroke.rpc.events import tier_to_message
from twostroke.rpc.v1 import control_pb2
from twostroke.worker.measured.page_time import PageTime, ReadTimes
from twostroke.worker.tiers.loads.prefetch import Prefetch
from twostroke.worker.tiers.loads.tier_loads import TierLoads
from twostroke.worker.tiers.metrics import TierMetrics
from twostroke.worker.tiers.page_tiers import MOST_STAGED, SECOND_SIGHT, STAGING_BYTES
from twostroke.worker.tiers.reader import THREADS, BusyThreads, MissingPage, PageRead, ReadJob, TierReaders

NO_BYTES = memoryview(b"")


class SimulatedDisk:
    """A worker's disk, which outlives its epochs."""

    def __init__(self, queue: EventQueue, shape: FleetShape) -> None:
        tiers, numbers = shape.tiers, itertools.count(1)
        self._queue = queue
        self.form = RecordFormat(b"", shape.page_bytes)
        self._budget = WriteBudget(tiers.disk_write_bytes_per_s, self.form.record_bytes)
        self.store = DiskStore(self.form, tiers.disk_bytes, lambda: Path(str(next(numbers))), self._reclaimed)
        self._write_s = shape.tier_page_s(Tier.DISK)
        self._most_writes = max(4, min(MOST_STAGED, STAGING_BYTES // shape.page_bytes))
        self._writing: set[BlockHash] = set()
        self._writer_free_s = 0.0
        self._tiers: SimulatedTiers | None = None

    def mount(self, tiers: SimulatedTiers) -> None:
        """Begins a new epoch of its worker. Pages on their way at the end of the last epoch are lost."""
        self._tiers = tiers
        self._writing = set()

    def may_write(self, block_hash: BlockHash, *, wanted_again: bool) -> bool:
        """Tells whether a page is to be written now, and takes its bytes from the budget."""
        if block_hash in self.store or block_hash in self._writing or len(self._writing) >= self._most_writes:
            return False
        if not self.store.has_room():
            return False
        return self._budget.take_page(self._queue.now_s, wanted_again=wanted_again)

    def write(self, block_hash: BlockHash, done: Callable[[], None] = lambda: None) -> None:
        """Writes a page after those before it; `done` is called when its bytes are needed no more."""
        writing, place = self._writing, self.store.reserve(self._queue.now_s).place
        writing.add(block_hash)
        self._writer_free_s = max(self._queue.now_s, self._writer_free_s) + self._write_s

        def written() -> None:
            done()
            if writing is not self._writing:
                self.store.abandon(place)
                return
            writing.discard(block_hash)
            if self.store.commit(block_hash, place, self._queue.now_s) and self._tiers is not None:
                self._tiers.stored_on(Tier.DISK, block_hash)

        self._queue.at(self._writer_free_s, written)

    def _reclaimed(self, record: ReclaimedRecord) -> None:
        if self._tiers is not None:
            self._tiers.removed_from(Tier.DISK, record.block_hash)


class SimulatedTiers:
    """The tiers of one epoch of a worker, as its pool and its loads see them."""

    def __init__(self, host: WorkerParts, disk: SimulatedDisk | None) -> None:
        shape = host.shape
        host_pages = shape.tiers.host_bytes // shape.page_bytes
        self._host = host
        self._store = HostStore(host_pages) if host_pages else None
        self._disk = disk
        self._sightings = Sightings()
        self._times = {tier: PageTime(shape.tier_page_s(tier)) for tier in (Tier.HOST, Tier.DISK)}
        self._readers = {tier: _readers(host.queue, tier, self) for tier in (Tier.HOST, Tier.DISK)}
        self.metrics = TierMetrics(host.metrics.registry, host.role.value)
        self.host_window = NOWHERE
        if disk is not None:
            disk.mount(self)
            for block_hash in disk.store:
                self.stored_on(Tier.DISK, block_hash)

    def loads(self) -> TierLoads:
        """Returns the live loads over these tiers."""
        host, tiers = self._host, self
        unchecked: Any = tiers  # what loads use of the live tiers is here
        return TierLoads(
            unchecked,
            host.pool,
            host.shape.block_size,
            new_session=host.new_session,
            compute_s=host.compute_s,
            wake=host.wake,
            clock=lambda: host.queue.now_s,
        )

    def prefetch(self, loads: TierLoads) -> Prefetch:
        """Returns the live prefetch over these tiers."""
        host, tiers = self._host, self
        unchecked: Any = tiers  # what prefetch uses of the live tiers is here
        return Prefetch(unchecked, host.pool, loads, host.shape.block_size, compute_s=host.compute_s, wake=host.wake)

    def rates(self) -> Iterator[control_pb2.TierRate]:
        """Yields what a worker reports of each tier that it uses."""
        shape = self._host.shape
        if self._store is not None:
            blocks, page_s = len(self._store), self._times[Tier.HOST].seconds
            yield control_pb2.TierRate(
                tier=tier_to_message(Tier.HOST), page_s=page_s, blocks=blocks, used_bytes=blocks * shape.page_bytes,
                capacity_bytes=shape.tiers.host_bytes,
            )  # fmt: skip
        if self._disk is not None:
            store, page_s = self._disk.store, self._times[Tier.DISK].seconds
            yield control_pb2.TierRate(
                tier=tier_to_message(Tier.DISK), page_s=page_s, blocks=len(store), used_bytes=store.used_bytes,
                capacity_bytes=store.most_bytes,
            )  # fmt: skip

    # What the pool tells

    def saw(self, block_hash: BlockHash) -> None:
        self._sightings.saw(block_hash)

    def evicting(self, block_hash: BlockHash, parent: BlockHash) -> None:
        """Keeps a block before the pool gives its page away."""
        is_kept = self._store is not None and self._keep_in_host(self._store, block_hash, parent)
        if not is_kept and self._disk is not None and self._may_write(self._disk, block_hash):
            self._disk.write(block_hash)

    # What loads ask and tell

    def when_turned_off(self, turned_off: Callable[[Tier], None]) -> None:
        """Does nothing: no simulated tier fails."""

    @property
    def used(self) -> frozenset[Tier]:
        return frozenset(tier for tier, each in ((Tier.HOST, self._store), (Tier.DISK, self._disk)) if each is not None)

    def place(self, tier: Tier, block_hash: BlockHash) -> HostEntry | RecordPlace | None:
        if tier is Tier.HOST:
            return None if self._store is None else self._store.get(block_hash)
        return None if self._disk is None else self._disk.store.find(block_hash)

    def readers(self, tier: Tier) -> TierReaders[Any]:
        return self._readers[tier]

    def hold(self, tier: Tier, places: Sequence[Any]) -> Callable[[], None]:
        store = self._store
        if tier is not Tier.HOST or store is None:
            return lambda: None
        entries = list(places)
        for entry in entries:
            store.hold(entry)

        def release() -> None:
            for entry in entries:
                store.release(entry)

        return release

    def page_time(self, tier: Tier) -> PageTime:
        return self._times[tier]

    def took(self, tier: Tier, times: ReadTimes) -> None:
        self._times[tier] = self._times[tier].after_reads(times)

    def took_at_least(self, tier: Tier, seconds: float, pages: int) -> None:
        self._times[tier] = self._times[tier].at_least(seconds / pages)

    def holds(self, block_hash: BlockHash) -> bool:
        return any(self.place(tier, block_hash) is not None for tier in self._readers)

    def reused(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Notes that a request found this block in the pool; now it is worth writing."""
        if self._disk is None:
            return
        self._sightings.saw(block_hash)
        if self._may_write(self._disk, block_hash):
            self._disk.write(block_hash)

    def hit(self, tier: Tier, block_hash: BlockHash) -> None:
        """Counts a page that came up and was used."""
        self._host.use.loaded_tokens[tier] += self._host.shape.block_size
        if tier is Tier.DISK and self._disk is not None:
            self._disk.store.hit(block_hash)
        else:
            self.touch(block_hash)

    def missing_read(self, tier: Tier, read: PageRead[Any]) -> None:
        """Does nothing for a page that was gone before it was read: its store has reported that already."""

    def turn_off(self, tier: Tier, reason: str) -> None:
        raise AssertionError(f"the simulated {tier.name} tier failed: {reason}")

    # What prefetch asks and tells

    @property
    def host_pages(self) -> int:
        return 0 if self._store is None else self._store.pages

    def touch(self, block_hash: BlockHash) -> None:
        """Makes a block the last one to leave host memory."""
        if self._store is not None and block_hash in self._store:
            self._store.touch(block_hash)

    def take_host_page(self) -> PageId | None:
        """Takes a page of host memory; None if all are held."""
        if self._store is None:
            return None
        victim = self._store.victim()
        if victim is not None:
            self._evict_from_host(self._store, victim)
        return self._store.take()

    def give_host_page_back(self, page: PageId) -> None:
        if self._store is not None:
            self._store.give_back(page)

    def promoted(self, block_hash: BlockHash, parent: BlockHash, page: PageId) -> bool:
        """Keeps a block that was read into a page that was taken; returns False if it is not to be kept there."""
        if self._store is None or block_hash in self._store:
            return False
        self._kept(self._store, HostEntry(block_hash, parent, page, b"", self._host.queue.now_s))
        return True

    # What is announced

    def stored_on(self, tier: Tier, block_hash: BlockHash) -> None:
        self._host.log.stored(block_hash, tier)

    def removed_from(self, tier: Tier, block_hash: BlockHash) -> None:
        self._host.log.removed(block_hash, tier)

    # Internals

    def _keep_in_host(self, store: HostStore, block_hash: BlockHash, parent: BlockHash) -> bool:
        """Copies a block to host memory, and from there to disk; returns False if all pages there are being read."""
        if block_hash in store:
            store.touch(block_hash)
            return True
        own = self.take_host_page()
        if own is None:
            return False
        self._kept(store, HostEntry(block_hash, parent, own, b"", self._host.queue.now_s))
        return True

    def _kept(self, store: HostStore, entry: HostEntry) -> None:
        """Announces a block that has come to host memory, and writes it to disk from there."""
        store.put(entry)
        self.stored_on(Tier.HOST, entry.block_hash)
        if self._disk is not None and self._may_write(self._disk, entry.block_hash):
            store.hold(entry)
            self._disk.write(entry.block_hash, functools.partial(store.release, entry))

    def _evict_from_host(self, store: HostStore, entry: HostEntry) -> None:
        if self._disk is not None and self._may_write(self._disk, entry.block_hash):
            self._disk.write(entry.block_hash)
        store.remove(entry.block_hash)
        self.removed_from(Tier.HOST, entry.block_hash)

    def _may_write(self, disk: SimulatedDisk, block_hash: BlockHash) -> bool:
        return disk.may_write(block_hash, wanted_again=self._sightings.count(block_hash) >= SECOND_SIGHT)


def _readers(queue: EventQueue, tier: Tier, tiers: SimulatedTiers) -> TierReaders[Any]:
    """Returns threads that share what the tier can do."""
    busy = BusyThreads(THREADS)
    threads: list[Any] = [SimulatedReader(queue, tier, tiers, busy, index) for index in range(THREADS)]
    return TierReaders(threads)


class SimulatedReader:
    """One reader thread of a tier: one page after the other, each in the tier's time."""

    def __init__(self, queue: EventQueue, tier: Tier, tiers: SimulatedTiers, busy: BusyThreads, index: int) -> None:
        self._queue = queue
        self._tier = tier
        self._tiers = tiers
        self._page_time = tiers.page_time(tier)
        self._busy = busy
        self._index = index
        self._jobs: deque[tuple[ReadJob[Any], Iterator[PageRead[Any]], Future[None]]] = deque()
        self.pending_pages = 0

    @property
    def busy_since_s(self) -> float | None:
        return self._busy.since_s[self._index]

    def start(self, job: ReadJob[Any], ended: Future[None]) -> None:
        """Reads the job's pages after those of earlier jobs."""
        self._jobs.append((job, iter(job.reads), ended))
        if self.busy_since_s is None:
            self._next()

    def probe(self, read: PageRead[Any], took: Future[ReadTimes]) -> None:
        """Reads a page to nowhere."""
        page_s, is_beside = self._page_s()
        self._queue.after(page_s, lambda: took.set_result(ReadTimes().plus(page_s, is_beside=is_beside)))

    def _page_s(self) -> tuple[float, bool]:
        """Returns how long a read that begins now takes, and whether another thread reads meanwhile."""
        is_beside = self._busy.is_beside(self._index)
        return self._page_time.reading_s(1, int(is_beside)), is_beside

    def _next(self) -> None:
        self._busy.end(self._index)
        while self._jobs:
            job, reads, ended = self._jobs[0]
            read = None if job.is_given_up else next(reads, None)
            if read is not None:
                self._busy.begin(self._index, self._queue.now_s)
                page_s, is_beside = self._page_s()
                self._queue.after(page_s, functools.partial(self._read, job, read, page_s, is_beside))
                return
            self._jobs.popleft()
            ended.set_result(None)

    def _read(self, job: ReadJob[Any], read: PageRead[Any], page_s: float, is_beside: bool) -> None:
        job.times = job.times.plus(page_s, is_beside=is_beside)
        if self._tier is Tier.DISK and self._tiers.place(self._tier, read.block_hash) is None:
            job.failed(read, MissingPage("its segment was reclaimed"))
        else:
            job.land(NOWHERE, read, NO_BYTES)
        self._next()


class _Nowhere(PageAccess):
    """Stands for the pool's memory, which a simulated worker does not have."""

    def read(self, batches: Iterable[Sequence[int]]) -> Iterator[list[memoryview]]:
        return iter(())

    def landing(self, pages: Sequence[int]) -> list[memoryview]:
        return [memoryview(bytearray()) for _ in pages]

    def landed(self) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


NOWHERE = _Nowhere()
