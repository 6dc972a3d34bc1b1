"""What a worker stored and removed, as a log whose equality with its caches can be proved.

Every batch has a sequence number and carries the size of the worker's set of (name, tier) after it, and the xor over
that set: a reader that applied every batch has the same digest, or knows that it does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twostroke.ids import BlockName, Epoch
from twostroke.kv_cache.block import NAME_BYTES
from twostroke.kv_cache.tier import Tier

RING_BATCHES = 4096
"""Batches kept for replay; at one per step that is minutes, and whoever is further behind takes a snapshot."""

_NAME_BITS = 8 * NAME_BYTES
_NAME_MASK = (1 << _NAME_BITS) - 1


@dataclass(frozen=True, slots=True)
class TierChange:
    """What came and went on one tier."""

    tier: Tier
    stored: tuple[BlockName, ...]
    removed: tuple[BlockName, ...]


@dataclass(frozen=True, slots=True)
class EventBatch:
    sequence: int
    stored: tuple[BlockName, ...]
    """On the device; so is `removed`."""
    removed: tuple[BlockName, ...]
    block_count: int
    """Size of the set of (name, tier) after this batch."""
    digest: bytes
    """Of that set: see `digest_term`."""
    snapshot: bool = False
    """What is stored here is the whole set, whatever the reader knew before."""
    cleared: bool = False
    """What is stored here is the whole set; follows on the batch before it, as any other."""
    lower_tiers: tuple[TierChange, ...] = ()
    published_s: float = 0.0
    """By the worker's wall clock; 0 where nobody measures."""

    @property
    def changes(self) -> tuple[TierChange, ...]:
        """Of all tiers."""
        return (TierChange(Tier.DEVICE, self.stored, self.removed), *self.lower_tiers)


def digest_term(name: BlockName, tier: Tier) -> int:
    """What one member of the set adds to the xor: turned left by the tier's number, so that a block that only moves
    between tiers, or lies on two, is seen."""
    value = int.from_bytes(name, "big")
    return ((value << tier) | (value >> (_NAME_BITS - tier))) & _NAME_MASK if tier else value


class EventLog:
    """One life of one worker's set of readable blocks."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._shelves = {tier: _Shelf(tier) for tier in Tier}
        self._ring: deque[EventBatch] = deque(maxlen=RING_BATCHES)
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Of the last batch published; 0 before the first."""
        return self._sequence

    @property
    def has_news(self) -> bool:
        return any(shelf.pending for shelf in self._shelves.values())

    def stored(self, name: BlockName, tier: Tier = Tier.DEVICE) -> None:
        self._shelves[tier].add(name)

    def removed(self, name: BlockName, tier: Tier = Tier.DEVICE) -> None:
        self._shelves[tier].remove(name)

    def publish(self, published_s: float = 0.0) -> EventBatch:
        """Close the current batch (an empty one is a heartbeat) and add it to the log.

        Where more went than is left, as when a cache is dropped, it says `cleared` and what is left.
        """
        self._sequence += 1
        changes = [shelf.change() for shelf in self._shelves.values()]
        cleared = sum(len(shelf.blocks) for shelf in self._shelves.values()) < sum(len(c.removed) for c in changes)
        if cleared:
            changes = [TierChange(shelf.tier, tuple(shelf.blocks), ()) for shelf in self._shelves.values()]
        batch = batch_of(
            self._sequence,
            changes,
            sum(len(shelf.blocks) for shelf in self._shelves.values()),
            self._xor(),
            cleared=cleared,
            published_s=published_s,
        )
        for shelf in self._shelves.values():
            shelf.pending.clear()
        self._ring.append(batch)
        return batch

    def since(self, start_sequence: int) -> list[EventBatch] | None:
        """Batches from `start_sequence` on, or None where the ring no longer (or not yet) reaches there."""
        if start_sequence == self._sequence + 1:
            return []
        if not self._ring or not self._ring[0].sequence <= start_sequence <= self._sequence:
            return None
        return [self._ring[index] for index in range(start_sequence - self._ring[0].sequence, len(self._ring))]

    def snapshot(self) -> EventBatch:
        """The set as of the last published batch."""
        changes = [TierChange(shelf.tier, tuple(shelf.published()), ()) for shelf in self._shelves.values()]
        count, xor = sum(len(change.stored) for change in changes), 0
        for change in changes:
            for name in change.stored:
                xor ^= digest_term(name, change.tier)
        return batch_of(self._sequence, changes, count, xor, snapshot=True)

    def _xor(self) -> int:
        xor = 0
        for shelf in self._shelves.values():
            xor ^= shelf.xor
        return xor


class _Shelf:
    """One tier of the set, and what is new there."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.blocks: set[BlockName] = set()
        self.xor = 0
        self.pending: dict[BlockName, bool] = {}
        """Name -> stored (or removed) since the last batch. What came and went in between is not told."""

    def add(self, name: BlockName) -> None:
        assert name not in self.blocks, f"block {name.hex()} is on tier {self.tier.name} already"
        self.blocks.add(name)
        self._note(name, stored=True)

    def remove(self, name: BlockName) -> None:
        self.blocks.remove(name)
        self._note(name, stored=False)

    def change(self) -> TierChange:
        stored = tuple(name for name, stored in self.pending.items() if stored)
        removed = tuple(name for name, stored in self.pending.items() if not stored)
        return TierChange(self.tier, stored, removed)

    def published(self) -> Iterator[BlockName]:
        """The set as of the last batch."""
        yield from (name for name in self.blocks if name not in self.pending)
        yield from (name for name, stored in self.pending.items() if not stored)

    def _note(self, name: BlockName, *, stored: bool) -> None:
        self.xor ^= digest_term(name, self.tier)
        if name in self.pending:
            del self.pending[name]
        else:
            self.pending[name] = stored


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
    """From one change per tier, the device's first."""
    device, *lower = changes
    return EventBatch(
        sequence=sequence,
        stored=device.stored,
        removed=device.removed,
        block_count=block_count,
        digest=xor.to_bytes(NAME_BYTES, "big"),
        snapshot=snapshot,
        cleared=cleared,
        lower_tiers=tuple(change for change in lower if change.stored or change.removed),
        published_s=published_s,
    )
