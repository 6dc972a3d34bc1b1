"""The waiting queue holds the sequences that wait for pages, in order, and the sum of their pending tokens."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from twostroke.scheduler.sequence import Sequence

ADMISSION_LOOKAHEAD = 16
"""Waiting sequences that one admission round looks at: short ones can pass, and it is cheap enough for every step."""


class WaitingQueue:
    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()
        self.pending_tokens = 0
        self.pending_pairs = 0.0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def append(self, sequence: Sequence) -> None:
        """Appends a sequence; one that has emitted tokens goes before all that have not: its client is reading."""
        begun = itertools.takewhile(lambda other: other.answer_tokens, self._sequences)
        self._sequences.insert(sum(1 for _ in begun) if sequence.answer_tokens else len(self), sequence)
        self._count(sequence, 1)

    def append_first(self, sequences: Iterable[Sequence]) -> None:
        """Puts the sequences before all others, in this order."""
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
        self.pending_tokens += change * sequence.pending_tokens
        self.pending_pairs += change * sequence.pending_pairs
