"""How deep loads reach where a model has several page groups.

A sequence continues after the blocks of which each group holds what it needs. So a load is of use only up to a depth
where all groups have that: in the pool, by a pull, or on a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.worker.tiers.page_tiers import PageTiers

LOWER_TIERS = (Tier.HOST, Tier.DISK)


class LoadDepth:
    """One owner, one thread: the event loop."""

    def __init__(self, tiers: Sequence[PageTiers], pool: BlockPool) -> None:
        """`tiers` are those of each group."""
        self._tiers = tiers
        self._pool = pool

    def of(self, hashes: Sequence[BlockHash], pays: Callable[[Tier, range, Sequence[BlockHash]], bool]) -> int:
        """Returns after how many of these blocks a sequence can continue once tiers have loaded theirs; 0 if none do.

        `pays` returns whether to load a range of blocks from a tier, given those that have to be read there. Pages of a
        tier above that did not pay are priced as those of the tier below. O(blocks).
        """
        if not self._tiers[GroupKind.FULL].used:
            return 0
        here = best = reached = self._pool.hits(hashes)
        above = Tier.DEVICE
        for tier in LOWER_TIERS:
            depth = self._down_to(tier, hashes)
            if depth <= reached:
                above = tier
            elif pays(tier, range(best, depth), self._unread(above, hashes[best:depth])):
                best, above = depth, tier
            reached = max(reached, depth)
        if best == here:
            return 0
        for group, tiers in zip(self._pool.others, self._tiers[1:], strict=True):
            if tiers.host is not None:
                for block_hash in group.last_of(hashes[:best]):
                    tiers.host.hit(block_hash)
        return best

    def _down_to(self, lowest: Tier, hashes: Sequence[BlockHash]) -> int:
        """Returns after how many of these blocks a sequence can continue with pages here and on tiers to `lowest`."""
        missing = (block for block, each in enumerate(hashes) if not self._has(GroupKind.FULL, lowest, each))
        depth = next(missing, len(hashes))
        for number, group in enumerate(self._pool.others, 1):
            depth = group.depth(hashes, depth, partial(self._has, GroupKind(number), lowest))
        return depth

    def _unread(self, above: Tier, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Returns the blocks whose pages are neither here nor on a tier down to `above`."""
        return [block_hash for block_hash in hashes if not self._has(GroupKind.FULL, above, block_hash)]

    def _has(self, group: GroupKind, lowest: Tier, block_hash: BlockHash) -> bool:
        """Returns whether a group's page of a block is here, or on a tier down to `lowest`."""
        tiers = self._tiers[group]
        is_here = self._pool.groups[group].find(block_hash) is not None
        return is_here or any(tiers.place(tier, block_hash) is not None for tier in LOWER_TIERS if tier <= lowest)
