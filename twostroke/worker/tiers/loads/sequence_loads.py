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
from twostroke.worker.supply.expected import ExpectedPages
from twostroke.worker.supply.supplier import Behind, Supplier
from twostroke.worker.tiers.loads.prices import LoadPrices
from twostroke.worker.tiers.loads.running import RunningLoads, reads_from
from twostroke.worker.tiers.loads.window_loads import LOWER_TIERS, WindowLoads
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import Price, pays, pays_in_part


class SequenceLoads:
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

    def depth(self, hashes: Sequence[BlockHash]) -> int:
        """Returns after how many of these blocks a sequence can go on once what pays is loaded; 0 if nothing is.

        Where pages hold what all layers keep it is 0: then loads may end anywhere.
        """
        return 0 if self._windows is None else self._windows.depth(hashes, self._pays_to_reach)

    def reach(self, sequence: KnownSequence) -> int:
        """Returns after how many blocks of a waiting sequence nothing is loaded for it."""
        hashes = sequence.block_hashes
        return len(hashes) if self._windows is None else max(sequence.pulled_blocks, self.depth(hashes))

    def supplier_of(self, sequence: KnownSequence) -> Supplier:
        """Returns the lower tiers as a supplier of an admitted sequence."""
        return _LowerTiers(self, sequence)

    def begin(self, sequence: KnownSequence, parts: Sequence[Part], behind: Behind) -> list[Part]:
        """Begins to load parts that an admitted sequence lacks; returns the others."""
        self._note_reuse(sequence)
        missing, windows = blocks_of(parts, GroupKind.FULL), blocks_of(parts, GroupKind.FURTHER)
        left = reached = missing if self._windows is None else self._windows.reached(sequence, missing)
        for tier in LOWER_TIERS:
            if left and tier in self._tiers.used:
                left = self._without_loaded(tier, sequence, left, behind)
        if self._windows is not None and windows and (behind.is_expected or len(left) < len(reached) or not reached):
            windows = self._without_loaded_windows(self._windows, sequence, windows, behind)
        return sorted([*parts_of([*left, *missing[len(reached) :]]), *parts_of(windows, GroupKind.FURTHER)])

    def _pays_to_reach(self, tier: Tier, blocks: range, unread: Sequence[BlockHash]) -> bool:
        return self._prices.pays_to_reach(tier, blocks, unread, is_alone=not self._pool.unwritten.blocks)

    def _note_reuse(self, sequence: KnownSequence) -> None:
        """Tells the tiers which blocks the sequence found in the pool."""
        if Tier.DISK not in self._tiers.used or sequence.preemptions:
            return
        for block in range(sequence.hit_blocks):
            self._tiers.offload.reused(sequence.pages[block], sequence.block_hashes[block], sequence.parent_of(block))
        if self._windows is not None:
            self._windows.note_reuse(sequence)

    def _without_loaded_windows(
        self, windows: WindowLoads, sequence: KnownSequence, blocks: Sequence[int], behind: Behind
    ) -> list[int]:
        """Loads window parts of these blocks from tiers, unless they are sent sooner; returns the others."""
        spared_s = self._prices.compute_s(windows.spared_blocks(sequence))
        other_s = min(spared_s, behind.arrival_s(blocks))
        left = {block: sequence.block_hashes[block] for block in blocks}
        for tier, reads in windows.reads_of(sequence, left):
            if not behind.is_expected or pays(len(reads) * windows.tiers.readers(tier).page_time.seconds, other_s):
                loaded = [read.block for read in reads]
                self._loads.start(
                    GroupKind.FURTHER, tier, reads, Price(self._prices.compute_s(loaded), other_s), behind
                )
                left = {block: left[block] for block in left if block not in loaded}
        return list(left)

    def _without_loaded(self, tier: Tier, sequence: KnownSequence, missing: list[int], behind: Behind) -> list[int]:
        """Loads what this tier holds of the missing blocks if that pays; returns the others."""
        hashes = sequence.block_hashes
        held = [block for block in missing if self._tiers.place(tier, hashes[block]) is not None]
        self._tiers.metrics.looked_up(tier, len(held), len(missing) - len(held))
        if not held:
            return missing
        if (
            not behind.is_expected
            and held[0] == missing[0]
            and (begun := self._from_end(tier, sequence, held, missing))
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

    def _from_end(self, tier: Tier, sequence: KnownSequence, held: list[int], missing: list[int]) -> frozenset[int]:
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
