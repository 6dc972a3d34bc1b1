"""Prompts that repeat an earlier answer: their blocks have the hashes that the simulated answer's blocks got.

A request log names only the blocks of prompts. A later prompt may begin with all blocks of an earlier one, as in a
chat. What follows is taken to be the answer to the earlier one. So the worker that gave the answer holds these blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.simulate.fleet.worker.steps import TOKEN
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.block import hash_block


class Continuations:
    """Names the blocks of one prompt after the other, in the order in which they come."""

    def __init__(self, block_size: int, name_of: Callable[[int], BlockHash]) -> None:
        self._block_size = block_size
        self._name_of = name_of
        self._named: dict[int, BlockHash] = {}
        """Hashes of the numbers that stand for blocks of answers."""
        self._answers: dict[BlockHash, int] = {}
        """The blocks that an answer fills, by the last block before them. It holds answers that no prompt has continued
        yet, or the rest of them."""

    def named(self, numbers: Sequence[int], input_tokens: int, output_tokens: int) -> list[BlockHash]:
        """Returns the hashes of a prompt's full blocks, given their numbers in the trace."""
        hashes: list[BlockHash] = []
        for number in numbers:
            hashes.append(self._hash(number, hashes[-1] if hashes else None))
        filled = (input_tokens + output_tokens - 1) // self._block_size - len(hashes)
        if hashes and filled > 0:
            self._answers.setdefault(hashes[-1], filled)
        return hashes

    def _hash(self, number: int, parent: BlockHash | None) -> BlockHash:
        if number in self._named:
            return self._named[number]
        filled = self._answers.pop(parent, 0) if parent is not None else 0
        if not filled:
            return self._name_of(number)
        assert parent is not None, "an answer has a block before it"
        found = self._named[number] = hash_block(parent, [TOKEN] * self._block_size)
        if filled > 1:
            self._answers[found] = filled - 1
        return found
