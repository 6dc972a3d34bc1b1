"""The event log of stored and removed blocks. With it a reader can prove that its copy equals the worker's caches.

Every batch has a sequence number, and carries the size of the worker's set of (hash, tier, group) and the xor over it.
A reader that applied every batch has the same digest. With another digest, it knows that its copy is wrong.

A batch of many blocks is sent in parts, which follow one another; so is the snapshot of a large set, whose parts are
made one at a time. The size and the digest, which every part carries, hold after the last one.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from twostroke.base.ids import BlockHash, Epoch
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import PLACES, TIERS, Tier

RING_BATCHES = 4096
"""Batches kept for replay, some minutes at one per step; readers further behind take a snapshot."""

PART_BLOCKS = 8192
"""Most blocks in one part: sender and reader need some milliseconds for it, and a message takes 128 KiB."""
BUCKETS = 64
"""Buckets of a tier's set, by the first byte of the hash. A snapshot copies only buckets that change before it reads
them."""

_HASH_BITS = 8 * HASH_BYTES
_HASH_MASK = (1 << _HASH_BITS) - 1


@dataclass(frozen=True, slots=True)
class TierChange:
    """Blocks whose parts of one page group were stored on one tier, or removed from it."""

    tier: Tier
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    group: GroupKind = GroupKind.FULL

    @property
    def place(self) -> tuple[Tier, GroupKind]:
        return self.tier, self.group

    @property
    def place_number(self) -> int:
        """Index of the place in `PLACES`."""
        return self.tier + TIERS * self.group


@dataclass(frozen=True, slots=True)
class EventBatch:
    sequence: int
    stored: tuple[BlockHash, ...]
    """Blocks whose pages of the first group were stored on the device tier; `removed` is for the same pages."""
    removed: tuple[BlockHash, ...]
    block_count: int
    """Size of the set of (hash, tier, group) after this batch."""
    digest: bytes
    """Digest of that set (see `digest_term`)."""
    snapshot: bool = False
    """Whether `stored` is the whole set; the reader forgets what it knew."""
    cleared: bool = False
    """Whether `stored` is the whole set, but the batch follows the one before it like any other."""
    further: tuple[TierChange, ...] = ()
    """Changes of the lower tiers, and of further page groups."""
    published_s: float = 0.0
    """Wall-clock time of publication; 0 if not measured."""
    part: int = 0
    """Number of this part of a batch that comes in several."""
    more: bool = False
    """Whether another part follows."""

    @property
    def changes(self) -> tuple[TierChange, ...]:
        """Changes of the tiers and groups that have any."""
        if not self.stored and not self.removed:
            return self.further
        return (TierChange(Tier.DEVICE, self.stored, self.removed), *self.further)

    def with_changes(self, changes: Iterable[TierChange]) -> EventBatch:
        """Returns the batch with these changes: at most one per tier and group, in the order of `PLACES`."""
        changed = [change for change in changes if change.stored or change.removed]
        stored: tuple[BlockHash, ...] = ()
        removed: tuple[BlockHash, ...] = ()
        if changed and changed[0].place == PLACES[0]:
            stored, removed = changed[0].stored, changed[0].removed
            del changed[0]
        return replace(self, stored=stored, removed=removed, further=tuple(changed))


_value_of: Callable[[bytes], int] = functools.partial(int.from_bytes, byteorder="big")


def digest_term(block_hash: BlockHash, tier: Tier, group: GroupKind = GroupKind.FULL) -> int:
    """Returns the xor term of one element: its hash rotated left by its place number. So a move changes the digest."""
    value, bits = int.from_bytes(block_hash, "big"), tier + TIERS * group
    return ((value << bits) | (value >> (_HASH_BITS - bits))) & _HASH_MASK if bits else value


class EventLog:
    """The set of readable blocks of one worker in one epoch, and its log."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._tiers = {place: TierBlocks(*place) for place in PLACES}
        self._places = tuple(self._tiers.values())
        self._ring: deque[EventBatch] = deque(maxlen=RING_BATCHES)
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Sequence number of the last published batch; 0 before the first."""
        return self._sequence

    @property
    def has_changes(self) -> bool:
        return any(tier_blocks.pending for tier_blocks in self._places)

    def device_blocks(self, group: GroupKind) -> TierBlocks:
        """Returns the blocks of one group on the device; a caller with many changes adds and removes them there."""
        return self._tiers[Tier.DEVICE, group]

    def stored(self, block_hash: BlockHash, tier: Tier = Tier.DEVICE, group: GroupKind = GroupKind.FULL) -> None:
        self._tiers[tier, group].add([block_hash])

    def removed(self, block_hash: BlockHash, tier: Tier = Tier.DEVICE, group: GroupKind = GroupKind.FULL) -> None:
        self._tiers[tier, group].remove([block_hash])

    def publish(self, published_s: float = 0.0) -> EventBatch:
        """Closes the current batch (an empty one is a heartbeat) and adds it to the log.

        If more blocks were removed than are left, as when a cache is dropped, the batch is `cleared` and lists the
        blocks that are left.
        """
        self._sequence += 1
        changed = [tier_blocks for tier_blocks in self._places if tier_blocks.pending]
        batch = self._empty(published_s)
        if changed:
            changes = [tier_blocks.change() for tier_blocks in changed]
            if batch.block_count < sum([len(change.removed) for change in changes]):
                batch = replace(batch, cleared=True)
                changes = [tier_blocks.whole(tuple(tier_blocks)) for tier_blocks in self._places]
            batch = batch.with_changes(changes)
            for tier_blocks in changed:
                tier_blocks.pending.clear()
        self._ring.append(batch)
        return batch

    def since(self, start_sequence: int) -> list[EventBatch] | None:
        """Returns the batches from `start_sequence` on, or None if the ring does not hold them."""
        if start_sequence == self._sequence + 1:
            return []
        if not self._ring or not self._ring[0].sequence <= start_sequence <= self._sequence:
            return None
        return [self._ring[index] for index in range(start_sequence - self._ring[0].sequence, len(self._ring))]

    def snapshot(self) -> EventBatch:
        """Returns the set as of the last published batch."""
        changes = [tier_blocks.whole(tuple(tier_blocks.published())) for tier_blocks in self._tiers.values()]
        count, xor = sum(len(change.stored) for change in changes), 0
        for change in changes:
            for block_hash in change.stored:
                xor ^= digest_term(block_hash, *change.place)
        whole = EventBatch(self._sequence, (), (), count, xor.to_bytes(HASH_BYTES, "big"), snapshot=True)
        return whole.with_changes(changes)

    def snapshot_parts(self) -> Generator[EventBatch]:
        """Yields the set as of the last published batch in parts, which are made as they are asked for.

        The log may change between two parts. Nothing may be pending when the first one is asked for.
        """
        assert not self.has_changes, "publish first: a snapshot is the set as of a published batch"
        tiers = [tier_blocks.freeze() for tier_blocks in self._tiers.values()]
        whole = replace(self._empty(), snapshot=True)
        try:
            yield from in_parts(whole, (piece for tier in tiers for piece in tier.pieces()))
        finally:
            for tier_blocks, frozen in zip(self._tiers.values(), tiers, strict=True):
                tier_blocks.readers.remove(frozen)

    def _empty(self, published_s: float = 0.0) -> EventBatch:
        """Returns a batch without changes after which the set is as it is now."""
        xor = functools.reduce(operator.xor, [tier_blocks.xor for tier_blocks in self._places])
        count, digest = sum(map(len, self._places)), xor.to_bytes(HASH_BYTES, "big")
        return EventBatch(self._sequence, (), (), count, digest, published_s=published_s)


class TierBlocks:
    """The blocks of one group on one tier, and the changes since the last batch."""

    def __init__(self, tier: Tier, group: GroupKind) -> None:
        self.tier = tier
        self.group = group
        self._buckets = [set[BlockHash]() for _ in range(BUCKETS)]
        self._count = 0
        self.xor = 0
        self.pending: dict[BlockHash, bool] = {}
        """Block hash -> stored (or removed) since the last batch; blocks that came and went are left out."""
        self.readers: list[_FrozenBlocks] = []
        """Snapshots that are under way."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BlockHash]:
        return (block_hash for bucket in self._buckets for block_hash in bucket)

    def add(self, block_hashes: Sequence[BlockHash]) -> None:
        buckets, pending = self._to_change(block_hashes), self.pending
        for block_hash in block_hashes:
            bucket = buckets[block_hash[0] % BUCKETS]
            assert block_hash not in bucket, f"block {block_hash.hex()} is on tier {self.tier.name} already"
            bucket.add(block_hash)
            if pending.pop(block_hash, None) is None:
                pending[block_hash] = True
        self._count += len(block_hashes)
        self.xor ^= self._digest_of(block_hashes)

    def remove(self, block_hashes: Sequence[BlockHash]) -> None:
        buckets, pending = self._to_change(block_hashes), self.pending
        for block_hash in block_hashes:
            buckets[block_hash[0] % BUCKETS].remove(block_hash)
            if pending.pop(block_hash, None) is None:
                pending[block_hash] = False
        self._count -= len(block_hashes)
        self.xor ^= self._digest_of(block_hashes)

    def change(self) -> TierChange:
        stored = tuple([block_hash for block_hash, stored in self.pending.items() if stored])
        removed = tuple([block_hash for block_hash, stored in self.pending.items() if not stored])
        return TierChange(self.tier, stored, removed, self.group)

    def whole(self, blocks: tuple[BlockHash, ...]) -> TierChange:
        """Returns the change that stores these blocks."""
        return TierChange(self.tier, blocks, (), self.group)

    def published(self) -> Iterator[BlockHash]:
        """Returns the set as of the last batch."""
        yield from (block_hash for block_hash in self if block_hash not in self.pending)
        yield from (block_hash for block_hash, stored in self.pending.items() if not stored)

    def freeze(self) -> _FrozenBlocks:
        """Returns the set as of now, unaffected by later changes. The caller removes it from `readers` after use."""
        frozen = _FrozenBlocks(self.tier, self.group, self._buckets)
        self.readers.append(frozen)
        return frozen

    def _digest_of(self, block_hashes: Sequence[BlockHash]) -> int:
        """Returns the xor of the terms of these blocks: rotating a xor of hashes is the same as rotating each hash."""
        xor = functools.reduce(operator.xor, map(_value_of, block_hashes), 0)
        return digest_term(BlockHash(xor.to_bytes(HASH_BYTES, "big")), self.tier, self.group)

    def _to_change(self, block_hashes: Sequence[BlockHash]) -> Sequence[set[BlockHash]]:
        """Returns the buckets to change, after open snapshots have copied those of these blocks."""
        for frozen in self.readers:
            for block_hash in block_hashes:
                frozen.keep(block_hash[0] % BUCKETS)
        return self._buckets


class _FrozenBlocks:
    """The blocks of one tier as of one moment, bucket by bucket."""

    def __init__(self, tier: Tier, group: GroupKind, buckets: Sequence[set[BlockHash]]) -> None:
        self._tier = tier
        self._group = group
        self._buckets = buckets
        self._next = 0
        """Index of the first bucket that is not yet yielded."""
        self._kept: dict[int, tuple[BlockHash, ...]] = {}
        """Copies of the buckets that changed before they were yielded, by index."""

    def keep(self, bucket: int) -> None:
        """Copies a bucket that is about to change, if it is not yet yielded."""
        if bucket >= self._next and bucket not in self._kept:
            self._kept[bucket] = tuple(self._buckets[bucket])

    def pieces(self) -> Iterator[TierChange]:
        while self._next < len(self._buckets):
            kept = self._kept.pop(self._next, None)
            blocks = tuple(self._buckets[self._next]) if kept is None else kept
            self._next += 1
            yield TierChange(self._tier, blocks, (), self._group)


def parts_of(batch: EventBatch) -> Iterator[EventBatch]:
    """Yields a batch in parts: what was stored comes first, so that a move is never seen as a loss."""
    changes = batch.changes
    if sum(len(change.stored) + len(change.removed) for change in changes) <= PART_BLOCKS:
        yield batch
        return
    stored = (replace(change, removed=()) for change in changes)
    removed = (replace(change, stored=()) for change in changes)
    yield from in_parts(batch, [*stored, *removed])


def in_parts(whole: EventBatch, pieces: Iterable[TierChange]) -> Iterator[EventBatch]:
    """Yields the parts of a batch that has the changes of `pieces`, and everything else from `whole`."""
    groups = _groups(pieces)
    part, group = 0, next(groups, ())
    for following in groups:
        yield _part(whole, part, group, more=True)
        part, group = part + 1, following
    yield _part(whole, part, group, more=False)


def _part(whole: EventBatch, part: int, pieces: Sequence[TierChange], *, more: bool) -> EventBatch:
    changes = [_merged(place, [piece for piece in pieces if piece.place == place]) for place in PLACES]
    return replace(whole, part=part, more=more).with_changes(changes)


def _merged(place: tuple[Tier, GroupKind], pieces: Sequence[TierChange]) -> TierChange:
    stored = tuple(block_hash for piece in pieces for block_hash in piece.stored)
    removed = tuple(block_hash for piece in pieces for block_hash in piece.removed)
    return TierChange(place[0], stored, removed, place[1])


def _groups(pieces: Iterable[TierChange]) -> Iterator[Sequence[TierChange]]:
    """Yields the pieces in groups of at most `PART_BLOCKS` blocks, cut where that is needed."""
    group, room = list[TierChange](), PART_BLOCKS
    for piece in pieces:
        start, blocks = 0, len(piece.stored) + len(piece.removed)
        while start < blocks:
            end = min(blocks, start + room)
            group.append(replace(piece, stored=piece.stored[start:end], removed=piece.removed[start:end]))
            room -= end - start
            start = end
            if not room:
                yield group
                group, room = [], PART_BLOCKS
    if group:
        yield group
