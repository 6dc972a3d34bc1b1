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
from twostroke.worker.tiers.loads.depth import LOWER_TIERS
from twostroke.worker.tiers.loads.prices import LoadPrices
from twostroke.worker.tiers.loads.running import RunningLoads, reads_from
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import Price

POOL_PART = 8
"""A load for another worker is begun while the loads of its tier keep less than the pool's pages divided by this."""


class SharedLoads:
    """One owner, one thread: the event loop."""

    def __init__(
        self, tiers: Sequence[PageTiers], pool: BlockPool, loads: RunningLoads, prices: Sequence[LoadPrices]
    ) -> None:
        """`tiers` and `prices` are those of each group."""
        self._tiers = tiers
        self._pool = pool
        self._loads = loads
        self._prices = prices

    def share(self, group: GroupKind, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> dict[int, PageId]:
        """Holds pages of a group for blocks that another worker asks for and that lower tiers hold, and loads them.

        For other groups than the first, the caller holds the pages of the blocks in that. It releases the pages
        (`GroupPool.unshare`) and then calls `give_up_unwanted`. A page without a writer did not come.
        """
        tiers = self._tiers[group]
        writer_of = self._pool.groups[group].writer_of
        coming = {block for block in blocks if writer_of(hashes[block]) is not None}
        if group is GroupKind.FULL:
            coming = {block for block in coming if tiers.holds(hashes[block])}
        held = [block for block in blocks if block in coming or tiers.holds(hashes[block])]
        shared, _ = self._share(group, hashes, [block for block in held if block in coming])
        for tier in LOWER_TIERS:
            missing = [block for block in held if block not in shared]
            if missing and tier in tiers.used:
                shared |= self._share_from(group, tier, hashes, missing)
        return shared

    def fetch(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> dict[int, PageId]:
        """Claims pages for blocks that the disk alone holds, and loads them; the caller releases them."""
        claimed, missing = self._share(GroupKind.FULL, hashes, blocks)
        compute_s = self._prices[GroupKind.FULL].compute_s(missing)
        self._load(GroupKind.FULL, Tier.DISK, hashes, missing, claimed, Price(compute_s, compute_s))
        return claimed

    def give_up_unwanted(self) -> None:
        """Gives up the loads none of whose missing pages is held."""
        self._loads.give_up_unwanted()

    def _share_from(
        self, group: GroupKind, tier: Tier, hashes: Sequence[BlockHash], missing: Sequence[int]
    ) -> dict[int, PageId]:
        """Holds and loads what this tier holds, as far as there is room and it pays; returns the pages."""
        held = [block for block in missing if self._tiers[group].place(tier, hashes[block]) is not None]
        if group is GroupKind.FULL:  # of a further group, the last blocks of a prefix are of use only together
            held = held[: self._room(tier)]
        price = self._prices[group].of(tier, hashes, held, None) if held else None
        if price is None:
            return {}
        shared, to_load = self._share(group, hashes, held)
        self._load(group, tier, hashes, to_load, shared, price.of_part(len(to_load), len(held)))
        return shared

    def _load(
        self,
        group: GroupKind,
        tier: Tier,
        hashes: Sequence[BlockHash],
        blocks: Sequence[int],
        pages: Mapping[int, PageId],
        price: Price,
    ) -> None:
        reads = reads_from(self._tiers[group], tier, hashes, {block: pages[block] for block in blocks})
        self._loads.start(group, tier, reads, price, None)

    def _room(self, tier: Tier) -> int:
        """Returns how many more pages of the first group loads for other workers may take."""
        most = max(1, self._pool.groups[GroupKind.FULL].total // POOL_PART)
        return max(0, most - self._loads.pending(GroupKind.FULL, tier))

    def _share(
        self, group: GroupKind, hashes: Sequence[BlockHash], blocks: Sequence[int]
    ) -> tuple[dict[int, PageId], list[int]]:
        """Holds pages for these blocks until there are no more; returns them, and the blocks that nobody brings."""
        shared: dict[int, PageId] = {}
        for block in blocks:
            page = self._page_of(group, hashes, block)
            if page is None:
                break
            shared[block] = page
        return shared, [block for block, page in shared.items() if self._pool.groups[group].is_unwritten(page)]

    def _page_of(self, group: GroupKind, hashes: Sequence[BlockHash], block: int) -> PageId | None:
        if group is not GroupKind.FULL:
            return self._pool.others[group - 1].share(hashes[block])
        claim = self._pool.claim([hashes[block]], hashes[block - 1] if block else root_hash(), 0, first=block)
        return None if claim is None else claim.pages[0]
