"""Which worker holds which blocks on which tier, from the KV events of workers. Each batch is checked by its digest.

A worker is one bit. For each tier and page group the index maps a block's hash to the bits of its holders. The bit of a
gone worker is ignored, and `sweep` removes its blocks in batches. No clock, socket or log is used here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from router.routing.held_blocks import BUCKETS, HeldBlocks
from router.routing.learned import ReReferenceRate
from router.routing.part_depths import deepest_of_all
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.events import EventBatch, TierChange, digest_term, in_parts
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import PLACES, TIERS, Tier

Mask = int
"""A set of holders: one bit each."""


def exponential_search(holders: Callable[[int], Mask], length: int) -> list[tuple[int, Mask]]:
    """Returns where holders of position 0 drop out: (first position that they do not hold, their bits).

    Holders of position i + 1 nearly always hold position i, so the set of holders only shrinks along the sequence. One
    walk in doubling steps (exponential search, Bentley and Yao 1976) brackets where it shrinks, for all holders at
    once; then only intervals whose ends differ are halved. That takes about log n lookups, and for each
    position where holders drop out the log of its bracket.

    It is exact if every holder holds a prefix of the sequence. For a holder with a hole, the result is at the hole or
    past it, because the search may step over the hole.
    """
    losses: list[tuple[int, Mask]] = []
    low, at_low, step = 0, holders(0) if length else 0, 1
    while at_low:
        high = min(low + step, length)
        at_high = at_low & holders(high) if high < length else 0
        if at_high != at_low:
            _halve(holders, (low, at_low, high, at_high), losses)
        low, at_low, step = high, at_high, 2 * step
    return losses


def _halve(
    holders: Callable[[int], Mask], bracket: tuple[int, Mask, int, Mask], losses: list[tuple[int, Mask]]
) -> None:
    """Finds all losses after the bracket's lower end, up to its upper end."""
    brackets = [bracket]
    while brackets:
        low, at_low, high, at_high = brackets.pop()
        if high - low == 1:
            losses.append((high, at_low & ~at_high))
            continue
        middle = (low + high) // 2
        at_middle = at_low & holders(middle) | at_high
        if at_middle != at_high:
            brackets.append((middle, at_middle, high, at_high))
        if at_low != at_middle:
            brackets.append((low, at_low, middle, at_middle))


SWEEP_BLOCKS = 5_000
"""Blocks of gone workers that are removed at once, in a few milliseconds."""

Coming = Callable[[BlockHash], Iterable[WorkerId]]
"""Returns the workers that are about to hold a block."""
Depth = TypeVar("Depth")

_UPWARDS = tuple(reversed(Tier))


class Applied(enum.Enum):
    PARTIAL = "partial"
    """A part of a batch was applied; the others are still to come."""
    APPLIED = "applied"
    """The index equals the worker's set as of this batch: size and digest agree."""
    OLD = "old"
    """The batch was applied already, or is of an earlier epoch: nothing changed."""
    GAP = "gap"
    """Batches are missing before this one; nothing was applied. Ask for a replay from `next_sequence`."""
    DIVERGED = "diverged"
    """Size or digest differ from the worker's. Only a snapshot helps; until then, batches give GAP."""


@dataclass(slots=True)
class _WorkerBlocks:
    """The blocks that one epoch of one worker holds."""

    bit: Mask
    epoch: Epoch
    sequence: int | None = None
    """Number of the last batch that was applied. None: parts of a batch are missing, or only a snapshot helps."""
    awaited: tuple[int, int] | None = None
    """The part that must come next, as (number of the batch, number of the part)."""
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    counts: list[int] = field(default_factory=lambda: [0] * len(PLACES))
    """Number of blocks in each place, pages of the first group first."""
    xor: int = 0

    @property
    def block_count(self) -> int:
        return sum(self.counts)

    @property
    def lowest(self) -> Tier:
        """The lowest tier that holds anything."""
        return next((tier for tier in _UPWARDS if self.counts[tier] or self.counts[TIERS + tier]), Tier.DEVICE)


class _WorkerMasks:
    """Turns masks into workers, eight bits at a time: with dozens of workers that is faster than bit by bit."""

    def __init__(self) -> None:
        self._by_bit: dict[Mask, WorkerId] = {}
        self._by_byte: dict[tuple[int, int], tuple[WorkerId, ...]] = {}
        """Workers by (position of the byte, its value). A value is added when it is first needed."""

    def put(self, bit: Mask, worker: WorkerId | None) -> None:
        """Gives the bit to `worker`, or takes it back (None)."""
        if worker is None:
            del self._by_bit[bit]
        else:
            self._by_bit[bit] = worker
        self._by_byte.clear()

    def workers_of(self, mask: Mask) -> list[WorkerId]:
        workers: list[WorkerId] = []
        for index, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
            if byte:
                workers.extend(self._by_byte.get((index, byte)) or self._find_workers(index, byte))
        return workers

    def _find_workers(self, place: int, byte: int) -> tuple[WorkerId, ...]:
        """Returns the workers of a byte, and keeps them for the next time."""
        bits = [1 << (8 * place + number) for number in range(8) if byte >> number & 1]
        found = self._by_byte[place, byte] = tuple(self._by_bit[bit] for bit in bits)
        return found


class PrefixIndex:
    def __init__(self, sweep_blocks: int = SWEEP_BLOCKS) -> None:
        self._sweep_blocks = sweep_blocks
        self._holders: tuple[dict[BlockHash, Mask], ...] = tuple({} for _ in PLACES)
        self._pages, self._parts = self._holders[: len(Tier)], self._holders[len(Tier) :]
        """Holders of pages of the first group, and of pages of the further group, on each tier."""
        self._in_places = tuple(
            tuple(holders for number, holders in enumerate(self._holders) if places >> number & 1)
            for places in range(1 << len(PLACES))
        )
        """The tables of `_holders` that belong to each set of places, given as bits."""
        self._workers: dict[WorkerId, _WorkerBlocks] = {}
        self._bits: dict[Mask, Mask] = {}
        """Each worker's bit, mapped to itself: all hashes that only this worker holds refer to one int object."""
        self._masks = _WorkerMasks()
        self._gone: list[tuple[Mask, HeldBlocks]] = []
        """Bits of gone workers and their blocks that are not swept yet. No other worker gets such a bit before."""
        self._gone_mask: Mask = 0
        self.re_reference = ReReferenceRate()
        """Counts evicted blocks that are requested again."""

    def __len__(self) -> int:
        """Returns the number of different hashes, counted once for each tier and group. Includes blocks to be swept."""
        return sum(len(holders) for holders in self._holders)

    @property
    def workers(self) -> list[WorkerId]:
        return list(self._workers)

    def block_count(self, worker: WorkerId) -> int:
        """Returns the number of blocks that the worker holds, counted once for each tier and group."""
        held = self._workers.get(worker)
        return held.block_count if held is not None else 0

    def apply(self, worker: WorkerId, epoch: Epoch, batch: EventBatch) -> Applied:
        held = self._blocks_of(worker, epoch)
        if held.epoch != epoch:
            return Applied.OLD
        refusal = _refusal(held, batch)
        if refusal is not None:
            return refusal
        if batch.part == 0 and (batch.snapshot or batch.cleared):
            self._begin_empty(worker, held)
        changes = batch.changes
        for change in changes:
            self._remove(held, change)
            self._store(held, change)
        for change in changes:  # after all changes: a block that has moved to another tier is not evicted
            if change.group is GroupKind.FULL:
                self.re_reference.evicted(block_hash for block_hash in change.removed if not self._is_held(block_hash))
        if batch.more:
            held.sequence, held.awaited = None, (batch.sequence, batch.part + 1)
            return Applied.PARTIAL
        held.sequence, held.awaited = batch.sequence, None
        if held.block_count != batch.block_count or held.xor != int.from_bytes(batch.digest, "big"):
            held.sequence = None
            return Applied.DIVERGED
        return Applied.APPLIED

    def epoch_of(self, worker: WorkerId) -> Epoch | None:
        held = self._workers.get(worker)
        return held.epoch if held is not None else None

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        """Returns the number of the batch that has to follow. None: only a snapshot helps."""
        held = self._workers.get(worker)
        if held is None or held.epoch != epoch or held.sequence is None:
            return None
        return held.sequence + 1

    def forget(self, worker: WorkerId) -> None:
        """Forgets a worker that is gone. `sweep` removes its blocks."""
        held = self._workers.pop(worker, None)
        if held is not None:
            self._retire(held)

    @property
    def has_gone(self) -> bool:
        """Whether blocks of gone workers are still to be swept."""
        return bool(self._gone)

    def sweep(self) -> None:
        """Removes some of the blocks of gone workers."""
        most = self._sweep_blocks
        while self._gone and most > 0:
            bit, blocks = self._gone[-1]
            for block_hash, places in blocks.take_out(most):
                for holders in self._in_places[places]:
                    self._drop_holder(holders, block_hash, bit)
                most -= 1
            if not blocks:
                self._gone.pop()
                self._gone_mask ^= bit
                del self._bits[bit]

    def snapshot(self, worker: WorkerId) -> EventBatch | None:
        """Returns the worker's blocks after its last batch, or None while the index may differ from the worker."""
        held = self._workers.get(worker)
        if held is None or held.sequence is None:
            return None
        changes = [
            TierChange(tier, tuple(held.blocks.on(number)) if held.counts[number] else (), (), group)
            for number, (tier, group) in enumerate(PLACES)
        ]
        digest = held.xor.to_bytes(HASH_BYTES, "big")
        return EventBatch(held.sequence, (), (), held.block_count, digest, snapshot=True).with_changes(changes)

    def snapshot_parts(self, worker: WorkerId) -> Generator[EventBatch]:
        """Yields a snapshot of a worker's blocks in parts, made one by one. Yields none while it may be wrong.

        It is the set when the first part is made. Neither later batches nor forgetting the worker change it.
        """
        held = self._workers.get(worker)
        if held is None or held.sequence is None:
            return
        digest = held.xor.to_bytes(HASH_BYTES, "big")
        whole = EventBatch(held.sequence, (), (), held.block_count, digest, snapshot=True)
        blocks = held.blocks
        frozen = blocks.freeze([number for number, count in enumerate(held.counts) if count])
        try:
            yield from in_parts(whole, frozen.pieces())
        finally:
            blocks.readers.remove(frozen)

    def leading_blocks(
        self,
        hashes: Sequence[BlockHash],
        also: Coming | None = None,
        *,
        tail_blocks: int = 0,
        also_parts: Coming | None = None,
    ) -> dict[WorkerId, tuple[int, ...]]:
        """Returns how many leading blocks each worker holds. Those with fewer come first, those with none are left out.

        `tail_blocks`: so many of the last of them need pages in the further group, too. `also_parts` returns workers
        that are about to hold such a page.

        There is one number for each tier down to the lowest on which the worker holds anything: blocks on the device;
        there or in host memory; there, in host memory or on disk. `also` returns workers that are about to hold a
        block on the device.

        The number for a tier is exact if the worker holds, down to that tier, the parent of every block that it holds.
        Leaf-first eviction and spilling downwards keep it so. For a worker with a hole, the number is at the hole or
        past it. If it is too high, the worker computes the hole, and the metrics show that the prediction was wrong.
        """
        lowest = next((tier for tier in _UPWARDS if self._pages[tier] or self._parts[tier]), Tier.DEVICE)
        if lowest is Tier.DEVICE and not tail_blocks:
            return self._reach(lowest, hashes, also, lambda depth: (depth,))
        reaches = [self._reach(tier, hashes, also, int) for tier in Tier if tier <= lowest]
        if tail_blocks:
            reaches = [
                self._with_parts(tier, hashes, also_parts, reach, tail_blocks)
                for tier, reach in zip(Tier, reaches, strict=False)
            ]
        return {worker: self._depths(worker, reaches) for worker in reaches[-1]}

    def _with_parts(
        self,
        lowest: Tier,
        hashes: Sequence[BlockHash],
        also: Coming | None,
        reach: dict[WorkerId, int],
        tail_blocks: int,
    ) -> dict[WorkerId, int]:
        """Returns after how many blocks each worker has all pages that it needs to continue, fewer blocks first."""
        parts = self._looking_down_to(lowest, hashes, also, self._parts)
        pages = [(depth, self._workers[worker].bit) for worker, depth in reach.items()]
        found = deepest_of_all(pages, tail_blocks, parts)
        return {worker: depth for depth, mask in reversed(found) for worker in self._masks.workers_of(mask)}

    def _reach(
        self, lowest: Tier, hashes: Sequence[BlockHash], also: Coming | None, as_depth: Callable[[int], Depth]
    ) -> dict[WorkerId, Depth]:
        """Returns how many leading blocks each worker holds on tiers down to `lowest`."""
        reach: dict[WorkerId, Depth] = {}
        for depth, mask in exponential_search(self._looking_down_to(lowest, hashes, also, self._pages), len(hashes)):
            reach.update(dict.fromkeys(self._masks.workers_of(mask), as_depth(depth)))
        return reach

    def _depths(self, worker: WorkerId, reaches: Sequence[dict[WorkerId, int]]) -> tuple[int, ...]:
        tiers = self._workers[worker].lowest + 1
        return tuple(accumulate((reach.get(worker, 0) for reach in reaches[:tiers]), max))

    def _looking_down_to(
        self, lowest: Tier, hashes: Sequence[BlockHash], also: Coming | None, of: Sequence[dict[BlockHash, Mask]]
    ) -> Callable[[int], Mask]:
        """Returns a function from a block's position to its holders, in the tables `of` tiers down to `lowest`."""
        tiers = [holders for holders in of[: lowest + 1] if holders]
        gone = self._gone_mask
        if len(tiers) == 1 and also is None and not gone:
            find = tiers[0].get
            return lambda position: find(hashes[position], 0)

        def holders(position: int) -> Mask:
            block_hash, mask = hashes[position], 0
            for on_tier in tiers:
                mask |= on_tier.get(block_hash, 0)
            mask &= ~gone
            if also is not None:
                for worker in also(block_hash):
                    held = self._workers.get(worker)
                    if held is not None:
                        mask |= held.bit
            return mask

        return holders

    def _blocks_of(self, worker: WorkerId, epoch: Epoch) -> _WorkerBlocks:
        """Returns the blocks of this epoch, or of a later one that is known. A new epoch begins empty."""
        held = self._workers.get(worker)
        if held is not None and held.epoch < epoch:
            self.forget(worker)
            held = None
        if held is None:
            held = self._workers[worker] = _WorkerBlocks(self._take_bit(worker), epoch)
        return held

    def _take_bit(self, worker: WorkerId) -> Mask:
        bit = 1
        while bit in self._bits:
            bit <<= 1
        self._bits[bit] = bit
        self._masks.put(bit, worker)
        return bit

    def _retire(self, held: _WorkerBlocks) -> None:
        """Has a worker's bit ignored, and its blocks swept."""
        self._masks.put(held.bit, None)
        self._gone.append((held.bit, held.blocks))
        self._gone_mask |= held.bit
        self.sweep()

    def _store(self, held: _WorkerBlocks, change: TierChange) -> None:
        number, bit, blocks = change.place_number, held.bit, held.blocks
        holders, buckets, is_read = self._holders[number], blocks.buckets, bool(blocks.readers)
        here, xor, count, (tier, group) = 1 << number, held.xor, 0, change.place
        for block_hash in change.stored:
            bucket = buckets[block_hash[0] % BUCKETS]
            places = bucket.get(block_hash, 0)
            if places & here:
                continue
            if is_read:
                blocks.keep(block_hash, places)
            bucket[block_hash] = places | here
            others = holders.get(block_hash)
            holders[block_hash] = bit if others is None else others | bit
            xor ^= digest_term(block_hash, tier, group)
            count += 1
        held.xor = xor
        held.counts[number] += count

    def _remove(self, held: _WorkerBlocks, change: TierChange) -> None:
        number, blocks = change.place_number, held.blocks
        here, (tier, group) = 1 << number, change.place
        for block_hash in change.removed:
            bucket = blocks.buckets[block_hash[0] % BUCKETS]
            places = bucket.get(block_hash, 0)
            if not places & here:
                continue
            if blocks.readers:
                blocks.keep(block_hash, places)
            if places == here:
                del bucket[block_hash]
            else:
                bucket[block_hash] = places ^ here
            self._drop_holder(self._holders[number], block_hash, held.bit)
            held.counts[number] -= 1
            held.xor ^= digest_term(block_hash, tier, group)

    def _begin_empty(self, worker: WorkerId, held: _WorkerBlocks) -> None:
        """Empties the set of a worker that still runs. It gets another bit, as its old blocks are swept later."""
        self._retire(held)
        held.bit = self._take_bit(worker)
        held.blocks = HeldBlocks()
        held.counts = [0] * len(PLACES)
        held.xor = 0

    def _is_held(self, block_hash: BlockHash) -> bool:
        return any(holders.get(block_hash, 0) & ~self._gone_mask for holders in self._pages)

    def _drop_holder(self, holders: dict[BlockHash, Mask], block_hash: BlockHash, bit: Mask) -> None:
        rest = holders[block_hash] & ~bit
        if rest:
            holders[block_hash] = self._bits.get(rest, rest)
        else:
            del holders[block_hash]


def _refusal(held: _WorkerBlocks, batch: EventBatch) -> Applied | None:
    """Returns why a batch, or a part of one, cannot be applied next. None: it can."""
    follows = (batch.sequence, batch.part) == held.awaited if batch.part else batch.snapshot
    if follows:
        return None
    if held.sequence is not None and batch.sequence <= held.sequence:
        return Applied.OLD
    if batch.part or held.sequence is None or batch.sequence > held.sequence + 1:
        return Applied.GAP
    return None
