"""Finished answers of a worker, each kept only for requests with the same salt.

The text of others is never proposed. If tenants shared a tree, one could learn another's text from the speed of its own
answers.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.speculation.draft import Proposal
from twostroke.speculation.suffix_tree import MOST_NEW_NODES, SuffixTree

MATCHED = (16, 8, 4)
"""Numbers of last tokens that are looked for in earlier answers, the largest first."""
MOST_TOKENS = 200_000
"""Tokens of answers that a worker keeps, as far as their trees have room."""
NODE_BYTES = 240
"""Memory for one node of a tree, with its share of dicts and of texts. Texts of two words take most: 211 bytes."""
MOST_BYTES = 64 << 20
"""Memory for all trees, in bytes. The oldest answers are removed before a suffix is added that might exceed it."""
LONGEST = 8192
"""Most tokens that are kept of one answer: its first ones."""
OWN_TOKENS = 16
"""Tokens that each answer counts for in addition to its own, because even a short one takes some memory."""
SUFFIXES_AT_ONCE = 32
"""Most suffixes that a proposal, or the end of an answer, adds to trees or removes from them. The work for a long
answer is so spread over many steps, each some tenths of a millisecond longer."""


@dataclass(slots=True)
class _AnswersOfSalt:
    tree: SuffixTree
    answers: int = 0


@dataclass(slots=True, eq=False)
class _Answer:
    salt: bytes
    tokens: array[int]
    tree: SuffixTree
    taken: int = 0
    """Number of suffixes that are in the tree: those that begin before this token."""
    removed: int = 0
    """Number of these suffixes, the first ones, that have been removed again."""

    @property
    def size(self) -> int:
        return len(self.tokens) + OWN_TOKENS


class FinishedAnswers:
    def __init__(self, most_tokens: int = MOST_TOKENS, most_bytes: int = MOST_BYTES) -> None:
        self._most_tokens = most_tokens
        self._most_nodes = most_bytes // NODE_BYTES
        self.nodes = 0
        """Nodes of all trees."""
        self._by_salt: dict[bytes, _AnswersOfSalt] = {}
        self._kept: deque[_Answer] = deque()
        self._tokens = 0
        self._coming: deque[_Answer] = deque()
        """Kept answers with suffixes that are not in a tree yet, in the same order."""
        self._leaving: deque[_Answer] = deque()
        """Forgotten answers with suffixes that are still in a tree."""

    def add(self, salt: bytes, answer: Sequence[int]) -> None:
        """Keeps an answer, and forgets the oldest ones where it is too many."""
        tokens = array("I", answer[:LONGEST])
        if not tokens:
            return
        of_salt = self._by_salt.get(salt)
        if of_salt is None:
            of_salt = self._by_salt[salt] = _AnswersOfSalt(SuffixTree())
            self.nodes += of_salt.tree.nodes
        of_salt.answers += 1
        kept = _Answer(salt, tokens, of_salt.tree)
        self._kept.append(kept)
        self._coming.append(kept)
        self._tokens += kept.size
        while self._tokens > self._most_tokens:
            self._forget_oldest()
        self._update_trees()

    def tree(self, salt: bytes) -> SuffixTree | None:
        """Updates trees a little, then returns the tree of the answers with this salt. Suffixes of the latest answers
        may be missing."""
        self._update_trees()
        found = self._by_salt.get(salt)
        return None if found is None else found.tree

    def _forget_oldest(self) -> None:
        oldest = self._kept.popleft()
        self._tokens -= oldest.size
        if self._coming and self._coming[0] is oldest:
            self._coming.popleft()
        of_salt = self._by_salt[oldest.salt]
        of_salt.answers -= 1
        if not of_salt.answers:
            del self._by_salt[oldest.salt]  # with its tree, and all that is in it
            self._leaving = deque(each for each in self._leaving if each.tree is not oldest.tree)
            self.nodes -= oldest.tree.nodes
        elif oldest.taken:
            self._leaving.append(oldest)

    def _update_trees(self) -> None:
        for _ in range(SUFFIXES_AT_ONCE):
            if self._leaving:
                answer = self._leaving[0]
                before = answer.tree.nodes
                answer.tree.remove(answer.tokens, answer.removed)
                self.nodes += answer.tree.nodes - before
                answer.removed += 1
                if answer.removed == answer.taken:
                    self._leaving.popleft()
            elif self._coming and self.nodes + MOST_NEW_NODES > self._most_nodes:
                self._forget_oldest()
            elif self._coming:
                answer = self._coming[0]
                before = answer.tree.nodes
                answer.tree.add(answer.tokens, answer.taken)
                self.nodes += answer.tree.nodes - before
                answer.taken += 1
                if answer.taken == len(answer.tokens):
                    self._coming.popleft()
            else:
                return


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
