"""The tiers below a simulated worker's pages: the product's own code in virtual time, over memory without any bytes.

Only the threads that read and write are simulated: each page takes them the tier's time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.worker.interfaces import SimulatedWorkerView
from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageAccess
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.byte_budget import WriteBudget
from twostroke.kv_cache.tiers.disk_store import DiskStore, ReclaimedRecord, RecordPlace, RecordReservation
from twostroke.kv_cache.tiers.files import SegmentFiles
from twostroke.kv_cache.tiers.record import RecordFormat
from twostroke.worker.measured.page_time import PageTime, ReadTimes
from twostroke.worker.tiers.disk_tier import DiskParts, DiskTier, staged_pages
from twostroke.worker.tiers.disk_writer import PageWrite
from twostroke.worker.tiers.host_tier import HostTier
from twostroke.worker.tiers.loads.prefetch import Prefetch
from twostroke.worker.tiers.loads.tier_loads import TierLoads
from twostroke.worker.tiers.metrics import TierChanges, TierMetrics
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.reader import THREADS, BusyThreads, MissingPage, PageRead, ReadJob, TierReaders

NO_BYTES = memoryview(b"")


class SimulatedDisk:
    """A worker's disk, which outlives its epochs."""

    def __init__(self, queue: EventQueue, shape: FleetShape) -> None:
        tiers, numbers = shape.tiers, itertools.count(1)
        self.queue = queue
        form = RecordFormat(b"", shape.page_bytes)
        self.budget = WriteBudget(tiers.disk_write_bytes_per_s, form.record_bytes)
        self.store = DiskStore(form, tiers.disk_bytes, lambda: Path(str(next(numbers))), self._reclaimed)
        self._write_s = shape.tier_page_s(Tier.DISK)
        self._free_s = 0.0
        """Time at which the writes under way have ended."""
        self._changes = TierChanges(GroupKind.FULL)
        self._writer = SimulatedWriter(self)

    def mount(self, changes: TierChanges) -> Any:
        """Begins a new epoch of its worker. Pages on their way at the end of the last epoch are lost."""
        self._changes, self._writer = changes, SimulatedWriter(self)
        return self._writer

    def write(self, writer: SimulatedWriter, place: RecordPlace, written: Future[None]) -> None:
        """Writes a page after those before it."""
        self._free_s = max(self.queue.now_s, self._free_s) + self._write_s

        def ended() -> None:
            if writer is self._writer:
                written.set_result(None)
            else:
                self.store.abandon(place)

        self.queue.at(self._free_s, ended)

    def _reclaimed(self, record: ReclaimedRecord) -> None:
        self._changes.aged(Tier.DISK, record.block_hash, record.age_s)


class SimulatedWriter:
    """The writer of one epoch. A place is all that a simulated disk has of a record."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def write(self, page: PageWrite, reservation: RecordReservation, written: Future[None]) -> None:
        self._disk.write(self, reservation.place, written)

    def bury(self, place: RecordPlace) -> None: ...

    def remove(self, paths: Iterable[Path]) -> None: ...


class SimulatedTiers(PageTiers):
    """The tiers of one epoch of a worker."""

    def __init__(self, worker: SimulatedWorkerView, disk: SimulatedDisk | None) -> None:
        self._worker = worker
        shape, changes = worker.shape, TierChanges(GroupKind.FULL)
        below = None if disk is None else self._on_disk(disk, changes)
        host_pages = shape.tiers.host_bytes // shape.page_bytes
        memory: Any = NoBytes(host_pages, shape.page_bytes)
        readers = self._readers_of(Tier.HOST)
        top = HostTier(memory, readers, changes, below, self._now_s) if host_pages else None
        super().__init__(memory, top, below, changes, wants_disk=False)
        self.report_to(TierMetrics(worker.metrics.registry, worker.role.value))
        self.begin_epoch(worker.log)

    def loads(self) -> TierLoads:
        """Returns the product's loads over these tiers."""
        worker = self._worker
        return TierLoads(
            (self,),
            worker.pool,
            worker.shape.block_size,
            new_session=worker.new_session,
            compute_s=worker.compute_s,
            wake=worker.wake,
            clock=self._now_s,
        )

    def prefetch(self, loads: TierLoads) -> Prefetch:
        """Returns the product's prefetch over these tiers."""
        worker = self._worker
        return Prefetch(self, worker.pool, loads, worker.shape.block_size, compute_s=worker.compute_s, wake=worker.wake)

    def hit(self, tier: Tier, block_hash: BlockHash) -> None:
        """Counts a loaded page that was used."""
        self._worker.use.loaded_tokens[tier] += self._worker.shape.block_size
        super().hit(tier, block_hash)

    def _on_disk(self, disk: SimulatedDisk, changes: TierChanges) -> DiskTier:
        staging: Any = NoBytes(staged_pages(disk.store.form.page_bytes), disk.store.form.page_bytes)
        readers = self._readers_of(Tier.DISK)
        parts = DiskParts(SegmentFiles(), disk.store, disk.budget, disk.mount(changes), readers, staging)
        return DiskTier(parts, changes, self._now_s)

    def _readers_of(self, tier: Tier) -> TierReaders[Any]:
        """Returns threads that share the tier's bandwidth."""
        queue, page_time, busy = (
            self._worker.queue,
            PageTime(self._worker.shape.tier_page_s(tier)),
            BusyThreads(THREADS),
        )
        threads: list[Any] = [
            SimulatedReader(queue, partial(self.place, tier), page_time, busy, index) for index in range(THREADS)
        ]
        return TierReaders(threads, page_time, self._now_s)

    def _now_s(self) -> float:
        return self._worker.queue.now_s


class SimulatedReader:
    """One reader thread of a tier: one page after the other, each in the tier's time."""

    def __init__(
        self, queue: EventQueue, place: Callable[[BlockHash], Any], page_time: PageTime, busy: BusyThreads, index: int
    ) -> None:
        """`place` returns where a block lies on the tier, if it does."""
        self._queue = queue
        self._place = place
        self._page_time = page_time
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
        """Takes the time of reading a page, and reports it."""
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
                self._queue.after(page_s, partial(self._read, job, read, page_s, is_beside))
                return
            self._jobs.popleft()
            ended.set_result(None)

    def _read(self, job: ReadJob[Any], read: PageRead[Any], page_s: float, is_beside: bool) -> None:
        job.times = job.times.plus(page_s, is_beside=is_beside)
        if self._place(read.block_hash) is None:
            job.failed(read, MissingPage("its segment was reclaimed"))
        else:
            job.land(NOWHERE, read, NO_BYTES)
        self._next()


class NoBytes:
    """Stands for memory of pages, which a simulated worker does not have."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.pages = pages
        self.page_bytes = page_bytes

    def page(self, page: PageId) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)

    def generation(self, page: PageId) -> int:
        return 0

    def access(self, batch_pages: int) -> PageAccess:
        return NOWHERE

    def close(self) -> None: ...


class _Nowhere(PageAccess):
    def read(self, batches: Iterable[Sequence[int]]) -> Iterator[list[memoryview]]:
        return ([NO_BYTES for _ in pages] for pages in batches)

    def landing(self, pages: Sequence[int]) -> list[memoryview]:
        return [memoryview(bytearray()) for _ in pages]

    def landed(self) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


NOWHERE: Final = _Nowhere()
