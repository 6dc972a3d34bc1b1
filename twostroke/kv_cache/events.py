"""What a pool stored and removed, as a log whose equality with the pool can be proved.

Every batch has a sequence number and carries the size and the xor of all names of the worker's set after it: a reader
that applied every batch has the same digest, or knows that it does not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from twostroke.ids import BlockName, Epoch
from twostroke.kv_cache.block import NAME_BYTES

RING_BATCHES = 4096
"""Batches kept for replay; at one per step that is minutes, and whoever is further behind takes a snapshot."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    sequence: int
    stored: tuple[BlockName, ...]
    removed: tuple[BlockName, ...]
    block_count: int
    digest: bytes
    """Xor of all names of the set after this batch."""
    snapshot: bool = False
    """`stored` is the whole set."""


class EventLog:
    """One life of one worker's set of readable blocks."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._blocks: set[BlockName] = set()
        self._xor = 0
        self._pending: dict[BlockName, bool] = {}
        """Name -> stored (or removed) since the last batch. What came and went in between is not told."""
        self._ring: deque[EventBatch] = deque(maxlen=RING_BATCHES)
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Of the last batch published; 0 before the first."""
        return self._sequence

    @property
    def has_news(self) -> bool:
        return bool(self._pending)

    def stored(self, name: BlockName) -> None:
        self._blocks.add(name)
        self._note(name, stored=True)

    def removed(self, name: BlockName) -> None:
        self._blocks.remove(name)
        self._note(name, stored=False)

    def publish(self) -> EventBatch:
        """Close the current batch (an empty one is a heartbeat) and add it to the log."""
        self._sequence += 1
        batch = EventBatch(
            sequence=self._sequence,
            stored=tuple(name for name, stored in self._pending.items() if stored),
            removed=tuple(name for name, stored in self._pending.items() if not stored),
            block_count=len(self._blocks),
            digest=self._digest(),
        )
        self._pending.clear()
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
        blocks = {name for name in self._blocks if name not in self._pending}
        blocks.update(name for name, stored in self._pending.items() if not stored)
        xor = 0
        for name in blocks:
            xor ^= int.from_bytes(name, "big")
        return EventBatch(
            self._sequence, tuple(blocks), (), len(blocks), xor.to_bytes(NAME_BYTES, "big"), snapshot=True
        )

    def _note(self, name: BlockName, *, stored: bool) -> None:
        self._xor ^= int.from_bytes(name, "big")
        if name in self._pending:
            del self._pending[name]
        else:
            self._pending[name] = stored

    def _digest(self) -> bytes:
        return self._xor.to_bytes(NAME_BYTES, "big")
