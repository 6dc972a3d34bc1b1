"""The sequences that wait for pages, in order, and the sum of what they will have computed here."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from twostroke.schedule.sequence import Sequence


class Line:
    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()
        self.owed_tokens = 0
        self.owed_pairs = 0.0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def append(self, sequence: Sequence) -> None:
        """Last; but one that has answered elsewhere stands before all that have not: its client is reading."""
        begun = itertools.takewhile(lambda other: other.answer_tokens, self._sequences)
        self._sequences.insert(sum(1 for _ in begun) if sequence.answer_tokens else len(self), sequence)
        self._count(sequence, 1)

    def append_first(self, sequences: Iterable[Sequence]) -> None:
        """In this order, before all others."""
        for sequence in reversed(list(sequences)):
            self._sequences.appendleft(sequence)
            self._count(sequence, 1)

    def take_first(self) -> Sequence:
        sequence = self._sequences.popleft()
        self._count(sequence, -1)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        self.owed_tokens += change * sequence.owed_tokens
        self.owed_pairs += change * sequence.owed_pairs
