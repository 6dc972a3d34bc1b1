"""The tiers of one page group of a worker, as loads see them: where blocks lie, and what to do after failed reads.

Pages go down by `Offload`, which gets the pool's evictions and reuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.memory import Pages
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder
from twostroke.transfer.copy_threads import off_loop
from twostroke.worker.tiers.copies.offload import LowerTier, Offload
from twostroke.worker.tiers.disk_tier import DiskTier
from twostroke.worker.tiers.host_tier import HostTier
from twostroke.worker.tiers.metrics import TierChanges, TierMetrics, TierUse
from twostroke.worker.tiers.reader import PageRead, TierReaders

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds for the threads to end; one that waits for a disk that never answers ends with the process."""


class PageTiers:
    """Owner of both tiers of a group; one thread, the worker's event loop."""

    def __init__(
        self,
        pool_memory: Pages,
        host: HostTier | None,
        disk: DiskTier | None,
        changes: TierChanges,
        *,
        wants_disk: bool,
    ) -> None:
        """`disk` is None although `wants_disk` where the disk is in trouble."""
        self._changes = changes
        self._opened: dict[Tier, LowerTier] = {}
        """The tiers even after they were turned off: their files, threads and memory are still here."""
        if host is not None:
            self._opened[Tier.HOST] = host
        if disk is not None:
            self._opened[Tier.DISK] = disk
            disk.report_to(self)
        self._used = dict(self._opened)
        self._host, self._disk = host, disk
        self._wanted = frozenset(self._opened) | (frozenset({Tier.DISK}) if wants_disk else frozenset())
        self._turned_off: Callable[[Tier], None] = lambda _: None
        self.offload = Offload(pool_memory, self._used, disk, changes)

    def begin_epoch(self, log: EventLog) -> None:
        """Announces what the tiers hold in a new epoch's log."""
        self._changes.begin_epoch(log)
        for tier, each in self._used.items():
            for block_hash in each:
                self._changes.stored(tier, block_hash)

    def report_to(self, metrics: TierMetrics) -> None:
        """Counts in these metrics from now on."""
        self._changes.report_to(metrics)

    def when_turned_off(self, turned_off: Callable[[Tier], None]) -> None:
        """Calls this with a tier that is turned off from now on: its loads are to be given up."""
        self._turned_off = turned_off

    @property
    def metrics(self) -> TierMetrics:
        return self._changes.metrics

    def uses(self) -> dict[Tier, TierUse]:
        """Returns the use of every tier that the worker was started with."""
        return {
            tier: self._used[tier].use() if tier in self._used else TierUse(is_up=False)
            for tier in sorted(self._wanted)
        }

    # Queries by loads

    @property
    def used(self) -> frozenset[Tier]:
        """The tiers that pages can be loaded from."""
        return frozenset(self._used)

    @property
    def host(self) -> HostTier | None:
        """The host tier, if one is in use."""
        return self._host if Tier.HOST in self._used else None

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier, if one is in use."""
        return self._disk if Tier.DISK in self._used else None

    def place(self, tier: Tier, block_hash: BlockHash) -> Any | None:
        """Returns where a block lies on a tier, if it does."""
        used = self._used.get(tier)
        return None if used is None else used.find(block_hash)

    def holds(self, block_hash: BlockHash) -> bool:
        return any(each.find(block_hash) is not None for each in self._used.values())

    def readers(self, tier: Tier) -> TierReaders[Any]:
        return self._opened[tier].readers

    def hold(self, tier: Tier, places: Sequence[Any]) -> Callable[[], None]:
        """Keeps these places of pages from being given away, until the returned function is called."""
        return self._opened[tier].hold(places)

    # Reports by loads

    def hit(self, tier: Tier, block_hash: BlockHash) -> None:
        """Notes that a page that was loaded was used."""
        self._opened[tier].hit(block_hash)

    def damaged_read(self, tier: Tier, read: PageRead[Any]) -> None:
        """Drops a block whose page was read with other bytes than were stored.

        It counts as a miss, not as damage, where the block has left the place that was read: others may have written
        there.
        """
        if self.place(tier, read.block_hash) != read.place:
            return
        self.metrics.failed_verification(tier)
        log.warning("page on a lower tier is damaged tier=%s block=%s", tier.name.lower(), read.block_hash.hex())
        self._drop(tier, read.block_hash, "damaged")

    def missing_read(self, tier: Tier, read: PageRead[Any]) -> None:
        """Drops a block whose page was not there any more, for instance because somebody removed its file."""
        if self.place(tier, read.block_hash) == read.place:
            self._drop(tier, read.block_hash, "forgotten")

    def damaged(self, block_hash: BlockHash) -> None:
        """Drops a block whose page changed in memory before it was written to disk."""
        self.metrics.failed_verification(Tier.HOST)
        self._drop(Tier.HOST, block_hash, "damaged")

    def failed(self, tier: Tier, error: BaseException) -> None:
        self.turn_off(tier, f"{type(error).__name__}: {error}")

    def turn_off(self, tier: Tier, reason: str) -> None:
        """Stops using a tier that has failed; files of a disk stay for the next worker."""
        used = self._used.pop(tier, None)
        if used is None:
            return
        for block_hash in used.turn_off(reason):
            self._changes.removed(tier, block_hash, "turned_off")
        self._turned_off(tier)

    # Forgetting and adopting

    def forgotten(self, block_hash: BlockHash) -> None:
        """Forgets a block that is not to be used any more."""
        for tier in self._used:
            self._drop(tier, block_hash, "forgotten")

    def forget_all(self) -> int:
        """Forgets every block of every tier, and removes the files, also of a disk tier that is turned off.

        Returns how many blocks there were.
        """
        self.offload.stop()
        forgotten = [(tier, block_hash) for tier, each in self._opened.items() for block_hash in each.forget_all()]
        for tier, block_hash in forgotten:
            self._changes.removed(tier, block_hash, "forgotten")
        return len(forgotten)

    def adopted(self, found: Sequence[ScannedSegment], folder: SegmentFolder) -> int:
        """Takes in and announces the pages of a dead worker; returns how many are new here."""
        if self.disk is None:
            folder.close()
            return 0
        blocks = self.disk.adopt(found, folder)
        for block_hash in blocks:
            self._changes.stored(Tier.DISK, block_hash)
        return len(blocks)

    # End

    async def wait_idle(self) -> None:
        """Waits for writes under way, at most `CLOSE_S` per tier."""
        for each in list(self._used.values()):
            await _in_time(each.wait_idle())

    async def close(self) -> None:
        self.offload.stop()  # here, where copies begin: the rest is done on a thread
        await _in_time(off_loop(self.close_now))

    def close_now(self) -> None:
        """Ends the threads after their queued jobs, and frees the memory."""
        self.offload.close()
        for each in reversed(self._opened.values()):  # what is written to disk may lie in host memory
            each.close()

    def _drop(self, tier: Tier, block_hash: BlockHash, reason: str) -> None:
        used = self._used.get(tier)
        if used is not None and used.drop(block_hash):
            self._changes.removed(tier, block_hash, reason)


async def _in_time(ending: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(ending, CLOSE_S)
    except TimeoutError:
        log.warning("disk does not answer seconds=%.1f", CLOSE_S)
