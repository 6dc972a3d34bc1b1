"""The tiers of all page groups of a worker.

Each group has host memory and a folder on disk of its own. It has the same share of these as of the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

from twostroke.base.ids import BlockHash, PageId
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.groups.group_pool import PoolListener
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.worker.engine_state import LoadedBranch
from twostroke.worker.tiers.adoption import adopt_left
from twostroke.worker.tiers.metrics import TierMetrics, TierUse
from twostroke.worker.tiers.page_tiers import PageTiers


class GroupTiers(LoadedBranch):
    def __init__(self, groups: Sequence[PageTiers]) -> None:
        """`groups` are the tiers of each group, in the order of `parts.GroupKind`."""
        self.groups = tuple(groups)
        self.full = self.groups[GroupKind.FULL]

    def listener(self, group: GroupKind) -> PoolListener:
        return _Listener(self.groups[group], self)

    def begin_epoch(self, log: EventLog) -> None:
        """Announces what the tiers hold in a new epoch's log."""
        for tiers in self.groups:
            tiers.begin_epoch(log)

    def report_to(self, metrics: TierMetrics) -> None:
        """Counts in these metrics from now on."""
        for tiers in self.groups:
            tiers.report_to(metrics)
        metrics.watch(self.uses)

    def uses(self) -> Mapping[Tier, TierUse]:
        """Returns the use of every tier that the worker was started with, all groups together."""
        uses = self.full.uses()
        for group in self.groups[1:]:
            further = group.uses()
            uses = {tier: use.with_group(further[tier]) for tier, use in uses.items()}
        return uses

    def forget_all(self) -> int:
        """Forgets all parts of all blocks, and removes the files; returns how many pages the first group had."""
        return [tiers.forget_all() for tiers in self.groups][GroupKind.FULL]

    def adopting(self, changed: Callable[[], None]) -> Iterator[Coroutine[None, None, None]]:
        """Yields for each group the coroutine that takes in pages of dead workers: see `adopt_left`."""
        own = frozenset(tiers.disk.folder.parent.name for tiers in self.groups if tiers.disk is not None)
        for tiers in self.groups:
            yield adopt_left(tiers, changed, kept=own)

    async def wait_idle(self) -> None:
        """Waits for writes under way, at most `CLOSE_S` per tier."""
        await asyncio.gather(*(tiers.wait_idle() for tiers in self.groups))

    async def close(self, engine: EngineThread | None) -> None:
        await asyncio.gather(*(tiers.close() for tiers in self.groups))


class _Listener:
    """Passes changes of the blocks of one group to its tiers."""

    def __init__(self, own: PageTiers, tiers: GroupTiers) -> None:
        self._saw = own.offload.saw
        self.evicting = own.offload.evicting
        self._tiers = tiers

    def stored(self, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            self._saw(block_hash)

    def removed(self, block_hashes: Sequence[BlockHash]) -> None:
        """Does nothing: what left the pool may lie on a tier."""

    def forgotten(self, block_hash: BlockHash) -> None:
        for tiers in self._tiers.groups:
            tiers.forgotten(block_hash)

    def new_writers(self, pages: Sequence[PageId]) -> None:
        """Does nothing: tiers have pages of their own."""
