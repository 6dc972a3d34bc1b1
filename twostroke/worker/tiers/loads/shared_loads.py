"""Loads for other workers, and for prefetch: they take pages that no sequence of this worker asked for.

So loads for others are begun only while those under way keep few pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.block import root_hash
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.worker.tiers.loads.prices import LoadPrices
from twostroke.worker.tiers.loads.running import RunningLoads, reads_from
from twostroke.worker.tiers.loads.window_loads import LOWER_TIERS, WindowLoads
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import Price

POOL_PART = 8
"""A load for another worker is begun while the loads of its tier keep less than the pool's pages divided by this."""


class SharedLoads:
    """One owner, one thread: the event loop."""

    def __init__(
        self,
        tiers: PageTiers,
        pool: BlockPool,
        loads: RunningLoads,
        prices: LoadPrices,
        windows: WindowLoads | None,
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._loads = loads
        self._prices = prices
        self._windows = windows

    def share(self, group: int, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> dict[int, PageId]:
        """Holds pages of a group for blocks that another worker asks for, as far as lower tiers hold these, and loads
        them.

        For other groups than the first, the caller holds the pages of the blocks in that. It releases the pages
        (`GroupPool.unshare`) and then calls `give_up_unwanted`. A page without a writer did not come.
        """
        if group is not GroupKind.FULL:
            return self._share_parts({block: hashes[block] for block in blocks})
        held = [block for block in blocks if self._tiers.holds(hashes[block])]
        claimed, _ = self._claim(hashes, [block for block in held if self._pool.is_coming(hashes[block])])
        for tier in LOWER_TIERS:
            missing = [block for block in held if block not in claimed]
            if missing and tier in self._tiers.used:
                claimed |= self._share_from(tier, hashes, missing)
        return claimed

    def fetch(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> dict[int, PageId]:
        """Claims pages for blocks that the disk alone holds, and loads them; the caller releases them."""
        claimed, missing = self._claim(hashes, blocks)
        compute_s = self._prices.compute_s(missing)
        reads = reads_from(self._tiers, Tier.DISK, hashes, {block: claimed[block] for block in missing})
        self._loads.start(GroupKind.FULL, Tier.DISK, reads, Price(compute_s, compute_s), None)
        return claimed

    def give_up_unwanted(self) -> None:
        """Gives up the loads of whose pages nobody holds any."""
        self._loads.give_up_unwanted()

    def _share_parts(self, hashes: Mapping[int, BlockHash]) -> dict[int, PageId]:
        """Holds window parts that are coming or lie on tiers; loads these."""
        if self._windows is None:
            return {}
        held = self._windows.share(hashes)
        for tier in LOWER_TIERS:
            slots = self._windows.unwritten(held)
            reads = self._windows.reads(tier, {block: hashes[block] for block in slots}, slots)
            compute_s = self._prices.compute_s(slots)
            self._loads.start(GroupKind.FURTHER, tier, reads, Price(compute_s, compute_s), None)
        return held

    def _share_from(self, tier: Tier, hashes: Sequence[BlockHash], missing: Sequence[int]) -> dict[int, PageId]:
        """Claims and loads what this tier holds, as far as there is room and it pays; returns the pages."""
        held = [block for block in missing if self._tiers.place(tier, hashes[block]) is not None]
        held = held[: self._room(tier)]
        price = self._prices.of(tier, hashes, held, None) if held else None
        if price is None:
            return {}
        claimed, to_load = self._claim(hashes, held)
        reads = reads_from(self._tiers, tier, hashes, {block: claimed[block] for block in to_load})
        self._loads.start(GroupKind.FULL, tier, reads, price.of_part(len(to_load), len(held)), None)
        return claimed

    def _room(self, tier: Tier) -> int:
        """Returns how many more pages loads for other workers may take."""
        return max(0, max(1, self._pool.total // POOL_PART) - self._loads.pending(GroupKind.FULL, tier))

    def _claim(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> tuple[dict[int, PageId], list[int]]:
        """Holds pages for these blocks until there are no more; returns them, and the blocks that were not there."""
        claimed: dict[int, PageId] = {}
        missing: list[int] = []
        for block in blocks:
            root = hashes[block - 1] if block else root_hash()
            claim = self._pool.claim([hashes[block]], root, 0, first=block)
            if claim is None:
                break
            claimed[block] = claim.pages[0]
            missing += [block] if claim.missing else []
        return claimed, missing
