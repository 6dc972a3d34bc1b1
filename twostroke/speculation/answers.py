"""Finished answers of a worker, each kept for requests with the same salt alone: nobody else's text is ever proposed.

A tenant could read another's text from how fast its own answers are, if both shared one tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.speculation.draft import Proposal
from twostroke.speculation.suffix_tree import SuffixTree

MATCHED = (16, 8, 4)
"""Lengths of the last tokens that are looked for in earlier answers, the longest first."""
MOST_TOKENS = 200_000
"""Tokens of answers that a worker keeps: about 60 MB of tree, where most of them repeat."""
LONGEST = 8192
"""Tokens of one answer that are kept, its first ones."""
SUFFIXES_AT_ONCE = 32
"""Suffixes that one proposal takes into trees or out of them: a long answer is taken in over many steps, some tenths of
a millisecond each."""


@dataclass(slots=True)
class _OfSalt:
    tree: SuffixTree
    answers: int = 0


@dataclass(slots=True)
class _Suffixes:
    """Suffixes of an answer that are to be taken into a tree, or out of it: those that begin at `start` or later."""

    act: Callable[[Sequence[int], int], None]
    answer: tuple[int, ...]
    start: int = 0


class FinishedAnswers:
    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._by_salt: dict[bytes, _OfSalt] = {}
        self._kept: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._tokens = 0
        self._left: deque[_Suffixes] = deque()
        """They are done in this order."""

    def add(self, salt: bytes, answer: Sequence[int]) -> None:
        """Keep an answer; the oldest ones go."""
        kept = tuple(answer[:LONGEST])
        if not kept:
            return
        of_salt = self._by_salt.setdefault(salt, _OfSalt(SuffixTree()))
        of_salt.answers += 1
        self._left.append(_Suffixes(of_salt.tree.add, kept))
        self._kept.append((salt, kept))
        self._tokens += len(kept)
        while self._tokens > self._most_tokens:
            self._forget_oldest()

    def tree(self, salt: bytes) -> SuffixTree | None:
        """Return the tree of the answers with this salt, as far as they have been taken in."""
        self._go_on()
        found = self._by_salt.get(salt)
        return None if found is None else found.tree

    def _forget_oldest(self) -> None:
        salt, answer = self._kept.popleft()
        of_salt = self._by_salt[salt]
        self._tokens -= len(answer)
        of_salt.answers -= 1
        if not of_salt.answers:
            del self._by_salt[salt]
        self._left.append(_Suffixes(of_salt.tree.remove, answer))

    def _go_on(self) -> None:
        for _ in range(SUFFIXES_AT_ONCE):
            if not self._left:
                return
            suffixes = self._left[0]
            suffixes.act(suffixes.answer, suffixes.start)
            suffixes.start += 1
            if suffixes.start == len(suffixes.answer):
                self._left.popleft()


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
