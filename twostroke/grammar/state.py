"""The state of one answer in its grammar, and the tokens that may come next there."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from twostroke.grammar.vocabulary import WORD_BITS, Vocabulary

Mask = npt.NDArray[np.uint32]
"""One bit for each token of the vocabulary, the lowest bit of the first word for token 0: those that may come next."""


class GrammarState:
    """It is a function of the grammar and of the tokens that were consumed."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, observe_s: Callable[[float], None]) -> None:
        """`observe_s` gets the seconds that each mask took."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._observe_s = observe_s
        self.tokens = 0
        """Tokens consumed."""
        self.forced_tokens = 0
        """Tokens that were taken because no other could come."""
        self.failure: str | None = None
        """Why the answer cannot go on: a token that may not come, or more work for one mask than a grammar may take."""
        self.mask: Mask = self._computed_mask()
        """The tokens that may come next, at least one unless it failed. An end token is among them where the answer may
        end here."""

    def consume(self, token: int) -> None:
        """Goes on by one token of the answer, and finds the tokens that may follow it."""
        self.tokens += 1
        if self._matcher.consume_token(token):
            self.mask = self._computed_mask()
        elif self.failure is None:
            self.failure = f"token {token} does not match the answer's grammar"

    def take_forced(self) -> int | None:
        """Returns the token that must come next, where only one may, and counts it."""
        token = self.forced_token
        self.forced_tokens += token is not None
        return token

    @property
    def forced_token(self) -> int | None:
        """The token that must come next, where only one may."""
        words = np.flatnonzero(self.mask)
        if len(words) != 1:
            return None
        word = int(self.mask[words[0]])
        return int(words[0]) * WORD_BITS + word.bit_length() - 1 if word & (word - 1) == 0 else None

    def _computed_mask(self) -> Mask:
        began_s = time.perf_counter()
        mask = self._found_mask()
        self._observe_s(time.perf_counter() - began_s)
        return mask

    def _found_mask(self) -> Mask:
        mask = np.zeros(self._vocabulary.mask_words, np.uint32)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            word, bit = divmod(self._vocabulary.end, WORD_BITS)
            mask[word] = np.uint32(1 << bit)
            return mask
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(mask)]
        if self._matcher.is_error() or not found.any():
            self.failure = "the answer's grammar takes too long to follow from here on"
        mask[: len(found)] = found
        return mask


def permitted(mask: Mask, size: int) -> npt.NDArray[np.int64]:
    """Returns the ids below `size` that a mask permits, in their order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=size))
