"""Finished answers of a worker, each kept for requests with the same salt alone: nobody else's text is ever proposed.

A tenant could read another's text from how fast its own answers are, if both shared one tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from twostroke.speculation.draft import Proposal
from twostroke.speculation.suffix_tree import SuffixTree

MATCHED = (16, 8, 4)
"""Lengths of the last tokens that are looked for in earlier answers, the longest first."""
MOST_TOKENS = 200_000
"""Tokens of answers that a worker keeps: about 60 MB of tree, where most of them repeat."""
LONGEST = 8192
"""Tokens of one answer that are kept, its first ones."""


class FinishedAnswers:
    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._trees: dict[bytes, tuple[SuffixTree, list[int]]] = {}
        """The tree of each salt, and how many answers are in it."""
        self._kept: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._tokens = 0

    def add(self, salt: bytes, answer: Sequence[int]) -> None:
        """Keep an answer; the oldest ones go."""
        kept = tuple(answer[:LONGEST])
        if not kept:
            return
        tree, count = self._trees.setdefault(salt, (SuffixTree(), [0]))
        tree.add(kept)
        count[0] += 1
        self._kept.append((salt, kept))
        self._tokens += len(kept)
        while self._tokens > self._most_tokens:
            self._forget_oldest()

    def tree(self, salt: bytes) -> SuffixTree | None:
        found = self._trees.get(salt)
        return None if found is None else found[0]

    def _forget_oldest(self) -> None:
        salt, answer = self._kept.popleft()
        tree, count = self._trees[salt]
        tree.remove(answer)
        self._tokens -= len(answer)
        count[0] -= 1
        if not count[0]:
            del self._trees[salt]


class AnswerSuffixes:
    """Proposes what followed in earlier answers with the same salt."""

    def __init__(self, answers: FinishedAnswers, salt: bytes) -> None:
        self._answers = answers
        self._salt = salt

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        tree = self._answers.tree(self._salt)
        if tree is None:
            return None
        for length in MATCHED:
            tokens = tree.continued(known[-length:], most) if len(known) >= length else []
            if tokens:
                return Proposal(tuple(tokens), f"suffix {length}")
        return None
