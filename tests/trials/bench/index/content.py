"""Which worker holds which blocks, and what is asked: pure, and the same for the same seed.

Half of the blocks belong to chains as short as a chat's, half to chains as long as a book's. All chains begin with one
common block, as all requests of a conversation service do. Of a chain one worker holds all, the next one half, the one
after that a quarter. One chain of each length is everybody's, to a different depth each: the most there is to find out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

HASH_BYTES = 16
SHALLOW_BLOCKS = 24
"""The mean prompt of the Mooncake conversation trace, in its blocks of 512 tokens."""
DEEP_BLOCKS = 750
"""The same prompt in blocks of 16 tokens."""
BATCH_BLOCKS = 64
"""Told at once: what a step of a thousand prompt tokens fills."""
UNKNOWN_BLOCKS = 4
"""At the end of each question: what is new in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """News of one worker: blocks that follow on one another."""

    worker: int
    parent: bytes | None
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    block_hashes: list[bytes]
    depths: dict[int, int]
    """The right answer: worker -> leading blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    workers: int
    blocks: int
    seed: int

    def stored(self) -> Iterator[Stored]:
        """All there is to learn, parents before children."""
        common = self._chain(0, 0)[:1]
        for worker in range(self.workers):
            yield Stored(worker=worker, parent=None, block_hashes=tuple(common))
        for depth in (SHALLOW_BLOCKS, DEEP_BLOCKS):
            for number in range(self._chains(depth)):
                hashes = self._chain(depth, number)
                for worker, held in self._holders(depth, number).items():
                    for start in range(1, held, BATCH_BLOCKS):
                        part = tuple(hashes[start : min(held, start + BATCH_BLOCKS)])
                        yield Stored(worker=worker, parent=hashes[start - 1], block_hashes=part)

    def questions(self, depth: int, count: int, *, popular: bool) -> Iterator[Question]:
        """For the chain that everybody holds, or for any of the others."""
        draws = random.Random(f"questions {self.seed} {depth} {popular}")
        for _ in range(count):
            number = 0 if popular else draws.randrange(1, self._chains(depth))
            new = draws.randbytes(HASH_BYTES * UNKNOWN_BLOCKS)
            depths = dict.fromkeys(range(self.workers), 1) | self._holders(depth, number)
            yield Question(block_hashes=self._chain(depth, number) + _cut(new), depths=depths)

    def _chains(self, depth: int) -> int:
        return self.blocks // 2 // (depth - 1)

    def _chain(self, depth: int, number: int) -> list[bytes]:
        common = random.Random(f"common {self.seed}").randbytes(HASH_BYTES)
        own = random.Random(f"chain {self.seed} {depth} {number}").randbytes(HASH_BYTES * max(0, depth - 1))
        return [common, *_cut(own)]

    def _holders(self, depth: int, number: int) -> dict[int, int]:
        if number == 0:
            return {worker: max(1, depth * (worker + 1) // self.workers) for worker in range(self.workers)}
        return {(number + step) % self.workers: depth // (1 << step) for step in range(3)}


def _cut(raw: bytes) -> list[bytes]:
    return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]
