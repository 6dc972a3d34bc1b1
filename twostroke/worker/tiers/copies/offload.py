"""Pages that go down: handles events of the pool's blocks, and copies blocks to the tiers of their group.

A page that the pool evicts goes to the highest tier that takes it: to host memory if there is a host tier, else to
disk. A reused page goes to disk at once. Few pages are copied on the event loop, many on a thread (see
`EvictionCopies`). No page of the pool is held for a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageAccess, Pages
from twostroke.kv_cache.tier import Tier
from twostroke.transfer.base import digest
from twostroke.transfer.copy_threads import CopyThreads
from twostroke.worker.tiers.copies.copy_target import CopyTarget
from twostroke.worker.tiers.copies.turn_copies import TURN_BYTES, TurnCopies
from twostroke.worker.tiers.disk_tier import DiskTier
from twostroke.worker.tiers.host_tier import HostTier
from twostroke.worker.tiers.metrics import TierChanges

LowerTier: TypeAlias = HostTier | DiskTier


class Offload:
    """One owner, one thread: the worker's event loop."""

    def __init__(
        self, memory: Pages, tiers: Mapping[Tier, LowerTier], disk: DiskTier | None, changes: TierChanges
    ) -> None:
        """`memory` is the pool's; `tiers` are those in use, highest first."""
        self._access: PageAccess | None = memory.access(1) if tiers else None
        self._access_off_loop: PageAccess | None = memory.access(1) if tiers else None
        self._threads: CopyThreads[PageAccess] | None = None
        self._tiers = tiers
        self._disk = disk
        self._changes = changes
        self._turn_copies = TurnCopies(memory, self._write_reused)

    # Events of the pool

    def saw(self, block_hash: BlockHash) -> None:
        """Notes that a block was filled: computed, pulled or loaded."""
        if self._disk is not None:
            self._disk.saw(block_hash)

    def reused(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Notes that a request found this block in the pool; now it is worth writing."""
        if self._disk is None or Tier.DISK not in self._tiers:
            return
        self._disk.saw(block_hash)
        if not self._disk.keeps(block_hash) and not self._turn_copies.soon(page, block_hash, parent):
            self._changes.metrics.skipped(Tier.DISK, "late")

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Keeps a block whose page the pool is about to give away, unless much was copied in this turn already."""
        if not self._tiers or self.keeps(block_hash):
            return
        if self._turn_copies.are_over:
            self._changes.metrics.skipped(self._highest.tier, "late")
        elif (target := self.target(block_hash, parent)) is not None:
            self._copy_now(page, target)

    # For eviction copies

    @property
    def is_used(self) -> bool:
        return bool(self._tiers)

    @property
    def most_copies(self) -> int:
        """Blocks that a lower tier can take at once."""
        return self._highest.room if self._tiers else 0

    def keeps(self, block_hash: BlockHash) -> bool:
        """Returns whether the highest tier has a block, so that it needs no copy; it is then evicted there last."""
        return self.is_used and self._highest.keeps(block_hash)

    def target(self, block_hash: BlockHash, parent: BlockHash) -> CopyTarget | None:
        """Makes room for a copy of a block on the highest tier that takes it; returns None if there is none."""
        targets = (tier.target(block_hash, parent) for tier in self._tiers.values())
        return next((target for target in targets if target is not None), None)

    def end_turn(self) -> None:
        """Copies nothing more in this turn of the event loop."""
        self._turn_copies.spend(TURN_BYTES)

    def copy_off_loop(
        self, copy: Callable[[PageAccess], list[bytes | None]], copied: Future[list[bytes | None]]
    ) -> None:
        """Runs a copy on a thread, which starts with the first one."""
        if self._threads is None:
            assert self._access_off_loop is not None, "there is a tier"
            self._threads = CopyThreads("tier-copies", [self._access_off_loop])
        self._threads.submit(copy, copied)

    # End

    def stop(self) -> None:
        """Drops the copies that wait for their turn."""
        self._turn_copies.stop()

    def close(self) -> None:
        """Ends the thread after its queued jobs."""
        if self._threads is not None:
            self._threads.close()
        for access in (self._access, self._access_off_loop):
            if access is not None:
                access.close()

    @property
    def _highest(self) -> LowerTier:
        return next(iter(self._tiers.values()))

    def _write_reused(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        target = None if self._disk is None else self._disk.target(block_hash, parent)
        if target is not None:
            self._copy_now(page, target)

    def _copy_now(self, page: PageId, target: CopyTarget) -> None:
        """Copies a page of the pool in this turn of the event loop."""
        self._turn_copies.spend(target.data.nbytes)
        assert self._access is not None, "there is a tier"
        (data,) = next(self._access.read([[page]]))
        target.data.data[:] = data
        target.commit(digest(target.data))
