"""Which worker holds which blocks, as the workers' own event logs tell it; equality is proved after every batch.

A worker is one bit; the index maps a block's name to the bits of its holders. Everything here is plain data: no clock,
no socket, no log.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from twostroke.ids import BlockName, Epoch, WorkerId
from twostroke.kv_cache.block import NAME_BYTES
from twostroke.kv_cache.events import EventBatch


class Applied(enum.Enum):
    APPLIED = "applied"
    """The index equals the worker's set as of this batch: size and digest agree."""
    OLD = "old"
    """Already applied, or of an earlier life of the worker: nothing changed."""
    GAP = "gap"
    """Batches are missing before this one; nothing was applied. Ask for a replay from `next_sequence`."""
    DIVERGED = "diverged"
    """Size or digest do not agree. Only a snapshot helps; until then batches are answered with GAP."""


@dataclass(slots=True)
class _Shelf:
    """What one life of one worker holds."""

    bit: int
    epoch: Epoch
    sequence: int | None = None
    """Of the last batch applied; None: only a snapshot helps."""
    names: set[BlockName] = field(default_factory=set)
    xor: int = 0


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[BlockName, int] = {}
        self._shelves: dict[WorkerId, _Shelf] = {}
        self._by_bit: dict[int, WorkerId] = {}

    def __len__(self) -> int:
        """Different names."""
        return len(self._holders)

    @property
    def workers(self) -> list[WorkerId]:
        return list(self._shelves)

    def apply(self, worker: WorkerId, epoch: Epoch, batch: EventBatch) -> Applied:
        shelf = self._shelf(worker, epoch)
        if shelf.epoch != epoch:
            return Applied.OLD
        if batch.snapshot:
            self._clear(shelf)
        elif shelf.sequence is None or batch.sequence > shelf.sequence + 1:
            return Applied.GAP
        elif batch.sequence <= shelf.sequence:
            return Applied.OLD
        self._remove(shelf, batch.removed)
        self._store(shelf, batch.stored)
        shelf.sequence = batch.sequence
        if len(shelf.names) != batch.block_count or shelf.xor != int.from_bytes(batch.digest, "big"):
            shelf.sequence = None
            return Applied.DIVERGED
        return Applied.APPLIED

    def epoch_of(self, worker: WorkerId) -> Epoch | None:
        shelf = self._shelves.get(worker)
        return shelf.epoch if shelf is not None else None

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        """The batch that would follow; None where only a snapshot helps."""
        shelf = self._shelves.get(worker)
        if shelf is None or shelf.epoch != epoch or shelf.sequence is None:
            return None
        return shelf.sequence + 1

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: nobody else's blocks are touched."""
        shelf = self._shelves.pop(worker, None)
        if shelf is not None:
            self._clear(shelf)
            del self._by_bit[shelf.bit]

    def snapshot(self, worker: WorkerId) -> EventBatch | None:
        """The worker's set as of the last batch applied, or None while that is not known to be true."""
        shelf = self._shelves.get(worker)
        if shelf is None or shelf.sequence is None:
            return None
        digest = shelf.xor.to_bytes(NAME_BYTES, "big")
        return EventBatch(shelf.sequence, tuple(shelf.names), (), len(shelf.names), digest, snapshot=True)

    def names_of(self, worker: WorkerId) -> frozenset[BlockName]:
        shelf = self._shelves.get(worker)
        return frozenset(shelf.names) if shelf is not None else frozenset()

    def leading_blocks(
        self, names: Sequence[BlockName], also: Callable[[BlockName], Iterable[WorkerId]] | None = None
    ) -> dict[WorkerId, int]:
        """How many of the first blocks each worker holds; workers that hold none are left out.

        `also` names workers that are about to hold a block. Gallops: exact where caches are closed under prefixes,
        as leaf-first eviction keeps them; a hole in a worker's cache may be overlooked.
        """

        def holders(position: int) -> int:
            mask = self._holders.get(names[position], 0)
            if also is not None:
                for worker in also(names[position]):
                    if worker in self._shelves:
                        mask |= self._shelves[worker].bit
            return mask

        return {self._by_bit[bit]: depth for bit, depth in _gallop(holders, len(names)).items()}

    def _shelf(self, worker: WorkerId, epoch: Epoch) -> _Shelf:
        """The shelf of this life, begun empty if it is later than the one known."""
        shelf = self._shelves.get(worker)
        if shelf is not None and shelf.epoch < epoch:
            self.forget(worker)
            shelf = None
        if shelf is None:
            bit = 1
            while bit in self._by_bit:
                bit <<= 1
            shelf = self._shelves[worker] = _Shelf(bit, epoch)
            self._by_bit[bit] = worker
        return shelf

    def _store(self, shelf: _Shelf, names: Iterable[BlockName]) -> None:
        for name in names:
            if name not in shelf.names:
                shelf.names.add(name)
                shelf.xor ^= int.from_bytes(name, "big")
                self._holders[name] = self._holders.get(name, 0) | shelf.bit

    def _remove(self, shelf: _Shelf, names: Iterable[BlockName]) -> None:
        for name in names:
            if name in shelf.names:
                shelf.names.remove(name)
                shelf.xor ^= int.from_bytes(name, "big")
                self._drop_holder(shelf, name)

    def _clear(self, shelf: _Shelf) -> None:
        for name in shelf.names:
            self._drop_holder(shelf, name)
        shelf.names = set()
        shelf.xor = 0

    def _drop_holder(self, shelf: _Shelf, name: BlockName) -> None:
        rest = self._holders[name] & ~shelf.bit
        if rest:
            self._holders[name] = rest
        else:
            del self._holders[name]


def _gallop(holders: Callable[[int], int], length: int) -> dict[int, int]:
    """Bit of each holder of position 0 -> first position that it does not hold."""
    depths: dict[int, int] = {}
    alive = holders(0) if length else 0
    position = 0
    """All of `alive` hold this position."""
    while alive:
        lost_at = _first_loss(holders, alive, position, length)
        still = alive & holders(lost_at) if lost_at < length else 0
        for bit in _bits(alive & ~still):
            depths[bit] = lost_at
        alive, position = still, lost_at
    return depths


def _first_loss(holders: Callable[[int], int], alive: int, position: int, length: int) -> int:
    """The first position after `position` that some of `alive` lack: doubling steps, then halving the interval."""
    step, low, high = 1, position, length
    while low + step < length:
        if alive & ~holders(low + step):
            high = low + step
            break
        low += step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if alive & ~holders(middle):
            high = middle
        else:
            low = middle
    return high


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
