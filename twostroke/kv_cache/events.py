"""The event log of stored and removed blocks, whose equality with the worker's caches can be proved.

Every batch has a sequence number, and carries the size of the worker's set of (hash, tier) and the xor over it. A
reader that applied every batch has the same digest, or knows that it has not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twostroke.ids import BlockHash, Epoch
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.tier import Tier

RING_BATCHES = 4096
"""Batches kept for replay, some minutes at one per step; readers further behind take a snapshot."""

_HASH_BITS = 8 * HASH_BYTES
_HASH_MASK = (1 << _HASH_BITS) - 1


@dataclass(frozen=True, slots=True)
class TierChange:
    """Blocks that were stored and removed on one tier."""

    tier: Tier
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class EventBatch:
    sequence: int
    stored: tuple[BlockHash, ...]
    """Blocks stored on the device tier, like `removed`."""
    removed: tuple[BlockHash, ...]
    block_count: int
    """Size of the set of (hash, tier) after this batch."""
    digest: bytes
    """Digest of that set (see `digest_term`)."""
    snapshot: bool = False
    """`stored` is the whole set; the reader forgets what it knew."""
    cleared: bool = False
    """`stored` is the whole set, but the batch follows the one before it like any other."""
    lower_tiers: tuple[TierChange, ...] = ()
    published_s: float = 0.0
    """Wall-clock time of publication; 0 if not measured."""

    @property
    def changes(self) -> tuple[TierChange, ...]:
        """Changes of all tiers."""
        return (TierChange(Tier.DEVICE, self.stored, self.removed), *self.lower_tiers)


def digest_term(block_hash: BlockHash, tier: Tier) -> int:
    """Return the xor term of one element: its hash rotated left by the tier's number, so that moves are seen."""
    value = int.from_bytes(block_hash, "big")
    return ((value << tier) | (value >> (_HASH_BITS - tier))) & _HASH_MASK if tier else value


class EventLog:
    """The set of readable blocks of one worker in one epoch, and its log."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._tiers = {tier: _TierBlocks(tier) for tier in Tier}
        self._ring: deque[EventBatch] = deque(maxlen=RING_BATCHES)
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Sequence number of the last published batch; 0 before the first."""
        return self._sequence

    @property
    def has_changes(self) -> bool:
        return any(tier_blocks.pending for tier_blocks in self._tiers.values())

    def stored(self, block_hash: BlockHash, tier: Tier = Tier.DEVICE) -> None:
        self._tiers[tier].add(block_hash)

    def removed(self, block_hash: BlockHash, tier: Tier = Tier.DEVICE) -> None:
        self._tiers[tier].remove(block_hash)

    def publish(self, published_s: float = 0.0) -> EventBatch:
        """Close the current batch (an empty one is a heartbeat) and add it to the log.

        If more blocks went than are left, as when a cache is dropped, the batch is `cleared` and lists what is left.
        """
        self._sequence += 1
        changes = [tier_blocks.change() for tier_blocks in self._tiers.values()]
        cleared = sum(len(tier_blocks.blocks) for tier_blocks in self._tiers.values()) < sum(
            len(c.removed) for c in changes
        )
        if cleared:
            changes = [
                TierChange(tier_blocks.tier, tuple(tier_blocks.blocks), ()) for tier_blocks in self._tiers.values()
            ]
        batch = batch_of(
            self._sequence,
            changes,
            sum(len(tier_blocks.blocks) for tier_blocks in self._tiers.values()),
            self._xor(),
            cleared=cleared,
            published_s=published_s,
        )
        for tier_blocks in self._tiers.values():
            tier_blocks.pending.clear()
        self._ring.append(batch)
        return batch

    def since(self, start_sequence: int) -> list[EventBatch] | None:
        """Return the batches from `start_sequence` on, or None if the ring does not hold them."""
        if start_sequence == self._sequence + 1:
            return []
        if not self._ring or not self._ring[0].sequence <= start_sequence <= self._sequence:
            return None
        return [self._ring[index] for index in range(start_sequence - self._ring[0].sequence, len(self._ring))]

    def snapshot(self) -> EventBatch:
        """Return the set as of the last published batch."""
        changes = [
            TierChange(tier_blocks.tier, tuple(tier_blocks.published()), ()) for tier_blocks in self._tiers.values()
        ]
        count, xor = sum(len(change.stored) for change in changes), 0
        for change in changes:
            for block_hash in change.stored:
                xor ^= digest_term(block_hash, change.tier)
        return batch_of(self._sequence, changes, count, xor, snapshot=True)

    def _xor(self) -> int:
        xor = 0
        for tier_blocks in self._tiers.values():
            xor ^= tier_blocks.xor
        return xor


class _TierBlocks:
    """The blocks of one tier, and the changes since the last batch."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.blocks: set[BlockHash] = set()
        self.xor = 0
        self.pending: dict[BlockHash, bool] = {}
        """Block hash -> stored (or removed) since the last batch; blocks that came and went are left out."""

    def add(self, block_hash: BlockHash) -> None:
        assert block_hash not in self.blocks, f"block {block_hash.hex()} is on tier {self.tier.name} already"
        self.blocks.add(block_hash)
        self._note(block_hash, stored=True)

    def remove(self, block_hash: BlockHash) -> None:
        self.blocks.remove(block_hash)
        self._note(block_hash, stored=False)

    def change(self) -> TierChange:
        stored = tuple(block_hash for block_hash, stored in self.pending.items() if stored)
        removed = tuple(block_hash for block_hash, stored in self.pending.items() if not stored)
        return TierChange(self.tier, stored, removed)

    def published(self) -> Iterator[BlockHash]:
        """Return the set as of the last batch."""
        yield from (block_hash for block_hash in self.blocks if block_hash not in self.pending)
        yield from (block_hash for block_hash, stored in self.pending.items() if not stored)

    def _note(self, block_hash: BlockHash, *, stored: bool) -> None:
        self.xor ^= digest_term(block_hash, self.tier)
        if block_hash in self.pending:
            del self.pending[block_hash]
        else:
            self.pending[block_hash] = stored


def batch_of(
    sequence: int,
    changes: Iterable[TierChange],
    block_count: int,
    xor: int,
    *,
    snapshot: bool = False,
    cleared: bool = False,
    published_s: float = 0.0,
) -> EventBatch:
    """Return a batch of one change per tier, the device's first."""
    device, *lower = changes
    return EventBatch(
        sequence=sequence,
        stored=device.stored,
        removed=device.removed,
        block_count=block_count,
        digest=xor.to_bytes(HASH_BYTES, "big"),
        snapshot=snapshot,
        cleared=cleared,
        lower_tiers=tuple(change for change in lower if change.stored or change.removed),
        published_s=published_s,
    )
