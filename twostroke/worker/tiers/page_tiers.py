"""The tiers of one page group of a worker: what the pool tells them, what they keep, and what they announce.

A page that the pool evicts goes to host memory if there is a host tier, and to disk if the budget of written bytes has
room. A reused page goes to disk at once, within the whole budget; one that was seen once has a quarter of it. Few pages
are copied on the event loop, many on a thread (see `EvictionCopies`). No page of the pool is held for a copy.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.memory import PageAccess, PageMemory, Pages
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.disk_store import ReclaimedRecord, RecordPlace
from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder
from twostroke.kv_cache.tiers.host_store import HostEntry
from twostroke.kv_cache.tiers.sightings import Sightings
from twostroke.transfer.base import digest
from twostroke.transfer.copy_threads import CopyThreads, off_loop
from twostroke.worker.measured.page_time import PageTime, ReadTimes
from twostroke.worker.tiers.copies.copy_target import CopyTarget
from twostroke.worker.tiers.copies.turn_copies import TURN_BYTES, TurnCopies
from twostroke.worker.tiers.disk_tier import DiskFetcher, DiskTier, OpenedDisk, PageWrite
from twostroke.worker.tiers.host_tier import HostFetcher, HostTier
from twostroke.worker.tiers.metrics import TierMetrics, TierUse
from twostroke.worker.tiers.reader import PageRead, TierReaders

log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Memory for pages that wait to be written to disk."""
MOST_STAGED = 64
SECOND_SIGHT = 2
"""Sightings from which on a block has been wanted again."""
CLOSE_S = 2.0
"""Time for the threads to end; one that waits for a disk that never answers dies with the process."""


class PageTiers:
    """Owner of both tiers of a group; one thread, the worker's event loop."""

    def __init__(
        self,
        pool_memory: Pages,
        host_memory: PageMemory | None,
        opened: OpenedDisk | None,
        *,
        wants_disk: bool,
        disk_bytes: int,
        write_bytes_per_s: float,
        group: GroupKind = GroupKind.FULL,
    ) -> None:
        """`opened` is None although `wants_disk` where the disk is in trouble."""
        self._group = group
        has_tier = host_memory is not None or opened is not None
        self._pool_window: PageAccess | None = pool_memory.access(1) if has_tier else None
        self.copy_threads = CopyThreads("tier-copies", [pool_memory.access(1)]) if has_tier else None
        self._turn_copies = TurnCopies(pool_memory, self._write_reused)
        self._sightings = Sightings()
        self._log: EventLog | None = None
        self._metrics: TierMetrics | None = None
        self._turned_off: Callable[[Tier], None] = lambda _: None
        self.host = None if host_memory is None else HostTier(host_memory)
        self.disk: DiskTier | None = None
        self._host_readers: TierReaders[HostEntry] | None = None
        self._disk_readers: TierReaders[RecordPlace] | None = None
        self._wants_disk = wants_disk
        self.host_window: PageAccess | None = None
        """The host tier's pages, for the one job at a time that reads from disk to these."""
        if self.host is not None:
            self.host_window = self.host.memory.access(1)
            self._host_readers = TierReaders.of("tier-host", functools.partial(HostFetcher, self.host), pool_memory)
        if opened is not None:
            self.disk = DiskTier(opened, self, most_bytes=disk_bytes, write_bytes_per_s=write_bytes_per_s)
            page_bytes = pool_memory.layout.page_sizes[group]
            self._staging = PageMemory(_staged_pages(page_bytes), page_bytes)
            self._staging.map_in()
            self._staged = [PageId(page) for page in range(self._staging.pages)]
            self._disk_readers = TierReaders.of("tier-disk", functools.partial(DiskFetcher, self.disk), pool_memory)
        self._opened_disk = self.disk
        """The disk tier even after it was turned off: its files are still here."""
        self._closing = tuple(each for each in (self.disk, self.host) if each is not None)
        """The tiers even after they were turned off: their threads and memory end when the worker does."""
        self._wants_host = host_memory is not None

    def begin_epoch(self, log: EventLog) -> None:
        """Announces what the tiers hold in a new epoch's log."""
        self._log = log
        for tier, block_hash in self._held():
            log.stored(block_hash, tier, self._group)

    def report_to(self, metrics: TierMetrics) -> None:
        """Counts in these metrics from now on."""
        self._metrics = metrics

    def when_turned_off(self, turned_off: Callable[[Tier], None]) -> None:
        """Calls this with a tier that is turned off from now on: its loads are to be given up."""
        self._turned_off = turned_off

    @property
    def metrics(self) -> TierMetrics:
        assert self._metrics is not None, "no epoch has begun"
        return self._metrics

    def uses(self) -> dict[Tier, TierUse]:
        """Returns the use of every tier that the worker was started with."""
        uses: dict[Tier, TierUse] = {}
        if self.host is not None:
            host = self.host
            uses[Tier.HOST] = TierUse(host.used_bytes, host.most_bytes, len(host.store), host.page_time.seconds)
        elif self._wants_host:
            uses[Tier.HOST] = TierUse(is_up=False)
        if self.disk is not None:
            store, page_s = self.disk.store, self.disk.page_time.seconds
            uses[Tier.DISK] = TierUse(store.used_bytes, store.most_bytes, len(store), page_s)
        elif self._wants_disk:
            uses[Tier.DISK] = TierUse(is_up=False)
        return uses

    @property
    def used(self) -> frozenset[Tier]:
        """The tiers that pages can be loaded from."""
        return frozenset(tier for tier, each in ((Tier.HOST, self.host), (Tier.DISK, self.disk)) if each is not None)

    def place(self, tier: Tier, block_hash: BlockHash) -> HostEntry | RecordPlace | None:
        """Returns where a block lies on a tier, if it does."""
        if tier is Tier.HOST:
            return None if self.host is None else self.host.store.get(block_hash)
        return None if self.disk is None else self.disk.store.find(block_hash)

    def readers(self, tier: Tier) -> TierReaders[Any]:
        readers = self._host_readers if tier is Tier.HOST else self._disk_readers
        assert readers is not None, f"there is no {tier.name} tier"
        return readers

    def hold(self, tier: Tier, places: Sequence[Any]) -> Callable[[], None]:
        """Keeps these places of pages from being given away, until the returned function is called."""
        if tier is not Tier.HOST or self.host is None:
            return lambda: None
        store, entries = self.host.store, list(places)
        for entry in entries:
            store.hold(entry)

        def release() -> None:
            for entry in entries:
                store.release(entry)

        return release

    def page_time(self, tier: Tier) -> PageTime:
        used = self.host if tier is Tier.HOST else self.disk
        assert used is not None, f"there is no {tier.name} tier"
        return used.page_time

    def took(self, tier: Tier, times: ReadTimes) -> None:
        """Learns from pages that were read."""
        used = self.host if tier is Tier.HOST else self.disk
        if used is not None:
            used.page_time = used.page_time.after_reads(times)

    def took_at_least(self, tier: Tier, seconds: float, pages: int) -> None:
        """Learns from a load that was given up before it had brought so many pages."""
        used = self.host if tier is Tier.HOST else self.disk
        if used is not None:
            used.page_time = used.page_time.at_least(seconds / pages)

    def holds(self, block_hash: BlockHash) -> bool:
        return any(block_hash in each.store for each in (self.host, self.disk) if each is not None)

    # What the pool tells

    def saw(self, block_hash: BlockHash) -> None:
        """Notes that a block was filled: computed, pulled or loaded."""
        if self.disk is not None:
            self._sightings.saw(block_hash)

    def reused(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Notes that a request found this block in the pool; now it is worth writing."""
        if self.disk is None:
            return
        self._sightings.saw(block_hash)
        if not self.disk.is_known(block_hash) and not self._turn_copies.soon(page, block_hash, parent):
            self.metrics.skipped(Tier.DISK, "late")

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Keeps a block whose page the pool is about to give away, unless much was copied in this turn already."""
        if self.host is not None and block_hash in self.host.store:
            self.host.store.touch(block_hash)
        elif self._turn_copies.are_over:
            self.metrics.skipped(Tier.DISK if self.host is None else Tier.HOST, "late")
        elif (target := self.copy_target(block_hash, parent)) is not None:
            self._copy_now(page, target)

    def end_turn(self) -> None:
        """Copies nothing more on the event loop in this turn of it."""
        self._turn_copies.spend(TURN_BYTES)

    @property
    def most_copies(self) -> int:
        """Blocks that a lower tier can take at once."""
        if self.host is not None:
            return self.host.store.pages
        return 0 if self.disk is None else len(self._staged)

    def keeps(self, block_hash: BlockHash) -> bool:
        """Tells whether a block that is evicted needs no copy; it is then the last to leave host memory."""
        if self.host is None:
            return self.disk is not None and self.disk.is_known(block_hash)
        self.touch(block_hash)
        return block_hash in self.host.store

    def copy_target(self, block_hash: BlockHash, parent: BlockHash) -> CopyTarget | None:
        """Makes room for a copy of a block on the highest tier that takes it; returns None if there is none."""
        if self.host is not None:
            target = self._host_target(self.host, block_hash, parent)
            if target is not None:
                return target
            self.metrics.skipped(Tier.HOST, "busy")
        if self.disk is not None and self._may_write(self.disk, block_hash):
            return self._disk_target(self.disk, block_hash, parent)
        return None

    # What prefetch asks

    @property
    def host_pages(self) -> int:
        """Pages of the host tier; 0 where there is none."""
        return 0 if self.host is None else self.host.store.pages

    def touch(self, block_hash: BlockHash) -> None:
        """Makes a block the last one to leave host memory."""
        if self.host is not None and block_hash in self.host.store:
            self.host.store.touch(block_hash)

    def take_host_page(self) -> PageId | None:
        """Takes a page of host memory for a block that comes up from disk; None if all are held."""
        if self.host is None:
            return None
        victim = self.host.store.victim()
        if victim is not None:
            self._evict_from_host(self.host, victim)
        return self.host.store.take()

    def promoted(self, block_hash: BlockHash, parent: BlockHash, page: PageId) -> bool:
        """Keeps a block whose bytes were read into a page that was taken; returns False if it is not to be kept
        there."""
        if self.host is None or block_hash in self.host.store:
            return False
        own = digest(self.host.memory.page(page))
        self._kept(self.host, HostEntry(block_hash, parent, page, own, time.monotonic()))
        return True

    def give_host_page_back(self, page: PageId) -> None:
        if self.host is not None:
            self.host.store.give_back(page)

    def forgotten(self, block_hash: BlockHash) -> None:
        """Forgets a block that is not to be used any more."""
        for tier in (Tier.HOST, Tier.DISK):
            self._drop(tier, block_hash, "forgotten")

    def forget_all(self) -> int:
        """Forgets every block of every tier, and removes the files, also of a disk tier that is turned off.

        Return how many blocks there were. A file that cannot be removed is a warning in the log.
        """
        self._turn_copies.stop()
        held = list(self._held())
        for tier, block_hash in held:
            if tier is Tier.HOST and self.host is not None:
                self.host.store.remove(block_hash)
            self._removed(tier, block_hash, "forgotten")
        if self._opened_disk is not None:
            self._opened_disk.forget_all()
        return len(held)

    # What loads tell

    def damaged_read(self, tier: Tier, read: PageRead[Any]) -> None:
        """A page's bytes were not those that were stored: it is not used, and never found again.

        It is a mere miss where the block has left the place that was read: others may have written there.
        """
        if self.place(tier, read.block_hash) != read.place:
            return
        self.metrics.failed_verification(tier)
        log.warning("page on a lower tier is damaged tier=%s block=%s", tier.name.lower(), read.block_hash.hex())
        self._drop(tier, read.block_hash, "damaged")

    def missing_read(self, tier: Tier, read: PageRead[Any]) -> None:
        """A page was not there any more, for instance because somebody removed its file."""
        if self.place(tier, read.block_hash) == read.place:
            self._drop(tier, read.block_hash, "forgotten")

    def hit(self, tier: Tier, block_hash: BlockHash) -> None:
        """A page came up and was of use."""
        if tier is Tier.DISK and self.disk is not None:
            self.disk.store.hit(block_hash)
        else:
            self.touch(block_hash)

    def adopted(self, found: Sequence[ScannedSegment], folder: SegmentFolder) -> int:
        """Takes in and announces the pages of a dead worker; returns how many are new here."""
        if self.disk is None:
            folder.close()
            return 0
        blocks = self.disk.adopt(found, folder)
        for block_hash in blocks:
            self._announce_stored(Tier.DISK, block_hash)
        return len(blocks)

    def turn_off(self, tier: Tier, reason: str) -> None:
        """Goes on without a tier that has failed; files of a disk stay for the next worker."""
        if tier is Tier.HOST:
            self._turn_off_host(reason)
        else:
            self._turn_off_disk(reason)
        self._turned_off(tier)

    def _turn_off_disk(self, reason: str) -> None:
        disk, self.disk = self.disk, None
        if disk is None:
            return
        log.warning("disk tier turned off reason=%s folder=%s", reason, disk.folder)
        blocks = list(disk.store)
        disk.leave()
        for block_hash in blocks:
            self._removed(Tier.DISK, block_hash, "turned_off")

    def _turn_off_host(self, reason: str) -> None:
        host, self.host = self.host, None
        if host is None:
            return
        log.warning("host tier turned off reason=%s", reason)
        for block_hash in host.store:
            self._removed(Tier.HOST, block_hash, "turned_off")

    # What the disk tells

    def reclaimed(self, record: ReclaimedRecord) -> None:
        self._announce_removed(Tier.DISK, record.block_hash)
        self.metrics.aged(Tier.DISK, record.age_s)

    def written(self, block_hash: BlockHash) -> None:
        if self.disk is not None:
            self.metrics.wrote(Tier.DISK, self.disk.form.record_bytes)
            self._announce_stored(Tier.DISK, block_hash)

    def damaged(self, block_hash: BlockHash) -> None:
        self.metrics.failed_verification(Tier.HOST)
        self._drop(Tier.HOST, block_hash, "damaged")

    def failed(self, error: BaseException) -> None:
        self.turn_off(Tier.DISK, f"{type(error).__name__}: {error}")

    # End

    async def wait_idle(self) -> None:
        """Waits a little for writes under way."""
        if self.disk is not None:
            await _in_time(self.disk.wait_idle())

    async def close(self) -> None:
        self._turn_copies.stop()  # here, where copies begin: the rest is done on a thread
        await _in_time(off_loop(self.close_now))

    def close_now(self) -> None:
        """Ends the threads, after what they do now, and frees the memory."""
        self._turn_copies.stop()
        for threads in (self.copy_threads, self._host_readers, self._disk_readers):
            if threads is not None:
                threads.close()
        if self.host_window is not None:
            self.host_window.close()
        for tier in self._closing:
            tier.close()
        if self._disk_readers is not None:
            self._staging.close()
        if self._pool_window is not None:
            self._pool_window.close()

    # Internals

    def _held(self) -> Iterator[tuple[Tier, BlockHash]]:
        for tier, each in ((Tier.HOST, self.host), (Tier.DISK, self.disk)):
            if each is not None:
                yield from ((tier, block_hash) for block_hash in each.store)

    def _host_target(self, host: HostTier, block_hash: BlockHash, parent: BlockHash) -> CopyTarget | None:
        """Takes a page of host memory; returns None if all pages there are being written."""
        own = self.take_host_page()
        if own is None:
            return None

        def commit(known: bytes) -> None:
            if self.host is not host or block_hash in host.store:
                host.store.give_back(own)
            else:
                self._kept(host, HostEntry(block_hash, parent, own, known, time.monotonic()))

        return CopyTarget(host.memory.page(own), commit, functools.partial(host.store.give_back, own))

    def _kept(self, host: HostTier, entry: HostEntry) -> None:
        """Announces a page that was copied to host memory, and writes it to disk from there."""
        host.store.put(entry)
        self.metrics.wrote(Tier.HOST, host.memory.page_bytes)
        self._announce_stored(Tier.HOST, entry.block_hash)
        if self.disk is not None and self._may_write(self.disk, entry.block_hash):
            host.store.hold(entry)
            done = functools.partial(host.store.release, entry)
            self.disk.write(PageWrite(entry.block_hash, entry.parent, host.data(entry), entry.digest, done))

    def _evict_from_host(self, host: HostTier, entry: HostEntry) -> None:
        """Frees the page of an entry; its last chance to get to disk is now."""
        block_hash = entry.block_hash
        if self.disk is not None and self._may_write(self.disk, block_hash):
            target = self._disk_target(self.disk, block_hash, entry.parent)
            target.data.data[:] = host.data(entry)
            target.commit(entry.digest)
        host.store.remove(block_hash)
        self._announce_removed(Tier.HOST, block_hash)
        self.metrics.aged(Tier.HOST, time.monotonic() - entry.since_s)

    def _may_write(self, disk: DiskTier, block_hash: BlockHash) -> bool:
        """Tells whether a page is to be written now, and takes its bytes from the budget."""
        if disk.is_known(block_hash):
            return False
        if not self._staged or disk.writes >= self._staging.pages or not disk.store.has_room():
            self.metrics.skipped(Tier.DISK, "busy")
            return False
        if not disk.is_within_budget(wanted_again=self._sightings.count(block_hash) >= SECOND_SIGHT):
            self.metrics.skipped(Tier.DISK, "budget")
            return False
        return True

    def _write_reused(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        if self.disk is not None and self._may_write(self.disk, block_hash):
            self._copy_now(page, self._disk_target(self.disk, block_hash, parent))

    def _copy_now(self, page: PageId, target: CopyTarget) -> None:
        """Copies a page of the pool in this turn of the event loop."""
        self._turn_copies.spend(target.data.nbytes)
        assert self._pool_window is not None, "there is a tier"
        (data,) = next(self._pool_window.read([[page]]))
        target.data.data[:] = data
        target.commit(digest(target.data))

    def _disk_target(self, disk: DiskTier, block_hash: BlockHash, parent: BlockHash) -> CopyTarget:
        """Takes a staging page, from which the block is written to disk."""
        own = self._staged.pop()
        page, done = self._staging.page(own), functools.partial(self._staged.append, own)

        def commit(known: bytes) -> None:
            if self.disk is disk and not disk.is_known(block_hash) and disk.store.has_room():
                disk.write(PageWrite(block_hash, parent, page.data, known, done))
            else:
                done()

        return CopyTarget(page, commit, done)

    def _drop(self, tier: Tier, block_hash: BlockHash, reason: str) -> None:
        if tier is Tier.HOST:
            was_here = self.host is not None and self.host.store.remove(block_hash) is not None
        else:
            was_here = self.disk is not None and self.disk.bury(block_hash)
        if was_here:
            self._removed(tier, block_hash, reason)

    def _removed(self, tier: Tier, block_hash: BlockHash, reason: str) -> None:
        self._announce_removed(tier, block_hash)
        self.metrics.evicted(tier, reason)

    def _announce_stored(self, tier: Tier, block_hash: BlockHash) -> None:
        if self._log is not None:
            self._log.stored(block_hash, tier, self._group)

    def _announce_removed(self, tier: Tier, block_hash: BlockHash) -> None:
        if self._log is not None:
            self._log.removed(block_hash, tier, self._group)


def _staged_pages(page_bytes: int) -> int:
    return max(4, min(MOST_STAGED, STAGING_BYTES // page_bytes))


async def _in_time(ending: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(ending, CLOSE_S)
    except TimeoutError:
        log.warning("disk does not answer seconds=%.1f", CLOSE_S)
