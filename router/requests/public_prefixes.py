"""Prefixes of prompts that every tenant may share: the operator has declared that they are no secret."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PublicPrefixes:
    """A prompt's blocks are public that lie wholly in what it has in common with one of the prefixes."""

    def __init__(self, prefixes: Iterable[Sequence[int]] = ()) -> None:
        self._prefixes = tuple(tuple(prefix) for prefix in prefixes)

    def blocks_of(self, prompt: Sequence[int], block_size: int) -> int:
        return max((common_length(prompt, prefix) for prefix in self._prefixes), default=0) // block_size


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts the tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))
