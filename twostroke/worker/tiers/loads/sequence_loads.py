"""Loads for sequences of this worker: its lower tiers are their first supplier.

A load is begun where it is predicted to take less time than computing its blocks, and than what another worker would
send. What neither a load nor another worker brings is computed.

Attention needs all blocks before a block, so computing goes forward. Where loading all takes about as long as computing
all, a load brings the last blocks, the last one first, while the first ones are computed, until they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.parts import GroupKind, Part, blocks_of, parts_of
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.worker.supply.supply import Behind, ExpectedPages, Supplier
from twostroke.worker.tiers.loads.depth import LOWER_TIERS, LoadDepth
from twostroke.worker.tiers.loads.prices import LoadPrices
from twostroke.worker.tiers.loads.running import RunningLoads, reads_from
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import Price, pays, pays_in_part


class SequenceLoads:
    """One owner, one thread: the event loop."""

    def __init__(
        self, tiers: Sequence[PageTiers], pool: BlockPool, loads: RunningLoads, prices: Sequence[LoadPrices]
    ) -> None:
        """`tiers` and `prices` are those of each group."""
        self._groups = tiers
        self._tiers = tiers[GroupKind.FULL]
        self._pool = pool
        self._loads = loads
        self._prices = prices[GroupKind.FULL]
        self._depth = LoadDepth(tiers, pool)

    def depth(self, hashes: Sequence[BlockHash]) -> int:
        """Returns after how many of these blocks a sequence can continue once what pays is loaded; 0 if nothing is.

        Where there is one page group it is 0: then loads may end anywhere.
        """
        return self._depth.of(hashes, self._pays_to_reach) if self._pool.others else 0

    def reach(self, sequence: KnownSequence) -> int:
        """Returns how many leading blocks of a waiting sequence may be loaded for it."""
        hashes = sequence.block_hashes
        return max(sequence.pulled_blocks, self.depth(hashes)) if self._pool.others else len(hashes)

    def supplier_of(self, sequence: KnownSequence) -> Supplier:
        """Returns the lower tiers as a supplier of an admitted sequence."""
        return _LowerTiers(self, sequence)

    def begin(self, sequence: KnownSequence, parts: Sequence[Part], behind: Behind) -> list[Part]:
        """Begins to load parts that an admitted sequence lacks; returns the others."""
        self._note_reuse(sequence)
        depth = len(sequence.pages) if sequence.further is None else sequence.further.pulled_depth
        missing, further = blocks_of(parts, GroupKind.FULL), blocks_of(parts, GroupKind.FURTHER)
        left = reached = [block for block in missing if block < depth]
        for tier in LOWER_TIERS:
            if left and tier in self._tiers.used:
                left = self._load_from(tier, sequence, left, behind)
        if further and (behind.is_expected or len(left) < len(reached) or not reached):
            further = self._load_ends(sequence, range(sequence.hit_blocks, depth), further, behind)
        return sorted([*parts_of([*left, *missing[len(reached) :]]), *parts_of(further, GroupKind.FURTHER)])

    def _pays_to_reach(self, tier: Tier, blocks: range, unread: Sequence[BlockHash]) -> bool:
        return self._prices.pays_to_reach(tier, blocks, unread, is_alone=not self._pool.unwritten.blocks)

    def _note_reuse(self, sequence: KnownSequence) -> None:
        """Tells the tiers which pages of each group the sequence found in the pool and continues from."""
        if Tier.DISK not in self._tiers.used or sequence.preemptions:
            return
        depth, hashes = sequence.hit_blocks, sequence.block_hashes
        for number, (group, tiers) in enumerate(zip(self._pool.groups, self._groups, strict=False)):
            for block in range(depth - len(group.last_of(hashes[:depth])), depth):
                page = sequence.page_of(Part(block, GroupKind(number)))
                if page is not None and group.is_filled(page):
                    tiers.offload.reused(page, hashes[block], sequence.parent_of(block))

    def _load_ends(self, sequence: KnownSequence, spared: range, blocks: list[int], behind: Behind) -> list[int]:
        """Loads what the further group needs at the end of a pull or load, if not sent sooner; returns the others.

        With it, the blocks that are `spared` need not be computed.
        """
        tiers, other_s = self._groups[GroupKind.FURTHER], min(self._prices.compute_s(spared), behind.arrival_s(blocks))
        for tier in LOWER_TIERS:
            pages = {part.block: page for part, page in sequence.pages_of(parts_of(blocks, GroupKind.FURTHER)).items()}
            reads = reads_from(tiers, tier, sequence.block_hashes, pages)
            if reads and (not behind.is_expected or pays(tiers.readers(tier).read_s(len(reads)), other_s)):
                loaded = [read.block for read in reads]
                price = Price(self._prices.compute_s(loaded), other_s)
                self._loads.start(GroupKind.FURTHER, tier, reads, price, behind)
                blocks = [block for block in blocks if block not in loaded]
        return blocks

    def _load_from(self, tier: Tier, sequence: KnownSequence, missing: list[int], behind: Behind) -> list[int]:
        """Loads what this tier holds of the missing blocks if that pays; returns the others."""
        hashes = sequence.block_hashes
        held = [block for block in missing if self._tiers.place(tier, hashes[block]) is not None]
        self._tiers.metrics.looked_up(tier, len(held), len(missing) - len(held))
        if not held:
            return missing
        if (
            not behind.is_expected
            and held[0] == missing[0]
            and (begun := self._load_from_end(tier, sequence, held, missing))
        ):
            return [block for block in missing if block not in begun]
        chosen: list[int] = []
        price: Price | None = None
        for batch in behind.batches(held):
            priced = self._prices.of(tier, hashes, [*chosen, *batch], behind)
            if priced is not None:
                chosen, price = [*chosen, *batch], priced
        if price is not None:
            pages = {block: sequence.pages[block] for block in chosen}
            self._loads.start(GroupKind.FULL, tier, reads_from(self._tiers, tier, hashes, pages), price, behind)
        loading = set(chosen)
        return [block for block in missing if block not in loading]

    def _load_from_end(
        self, tier: Tier, sequence: KnownSequence, held: list[int], missing: list[int]
    ) -> frozenset[int]:
        """Loads the last ones of these blocks, the last one first, where the others are computed meanwhile.

        Returns those that are loaded: none where loading or computing all of them is nearly as good.
        """
        compute_s = self._prices.compute_s(held)
        is_alone = self._pool.unwritten.blocks <= len(missing)
        if not pays_in_part(self._prices.load_s(tier, len(held)), compute_s, is_alone=is_alone):
            return frozenset()
        last = held[self._prices.first_to_load(tier, held) :]
        pages = {block: sequence.pages[block] for block in last}
        reads = reads_from(self._tiers, tier, sequence.block_hashes, pages)[::-1]
        parents = {block: sequence.parent_of(block) for block in last}
        price = Price(compute_s * len(last) / len(held), compute_s)
        self._loads.start(GroupKind.FULL, tier, reads, price, None, parents)
        return frozenset(last)


@dataclass(frozen=True, slots=True)
class _LowerTiers:
    loads: SequenceLoads
    sequence: KnownSequence

    @property
    def depth(self) -> int:
        return len(self.sequence.block_hashes)

    @property
    def expected(self) -> ExpectedPages | None:
        return None

    def begin(self, parts: Sequence[Part], behind: Behind) -> list[Part]:
        return self.loads.begin(self.sequence, parts, behind)
