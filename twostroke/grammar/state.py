"""A grammar state knows which tokens one answer may go on with."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from twostroke.grammar.mask import WORD_BITS, Mask
from twostroke.grammar.vocabulary import Vocabulary

TOO_LONG = "the answer's grammar takes too long to follow from here on"
SLOW_S = 0.002
"""Processor time of one advance after which a grammar goes on apart from others, and has no drafted tokens."""
LEAST_S = SLOW_S / 16
"""Least processor time that the next advance is expected to take, however quick the latest one was."""


class GrammarState:
    """It is a function of the grammar and of the tokens that were consumed.

    Its methods are called by one thread at a time. The mask is computed when it is first asked for: after a forced
    token nobody asks.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, observe_s: Callable[[float], None]) -> None:
        """`observe_s` gets the seconds that each mask took."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._observe_s = observe_s
        self._mask: Mask | None = None
        self._forced: list[int] = []
        """Tokens that come next for certain, the next one last: finding a run takes as long as the run, so it is found
        once. What is left of a run may have other tokens than a run that is found later, so each is found as soon as
        there is one, also by those who replay an answer or only ask for masks."""
        self.tokens = 0
        """Tokens consumed, without those of earlier attempts."""
        self.forced_tokens = 0
        """Tokens that were taken because no other could come."""
        self.failure: str | None = None
        """Why the answer cannot go on: a token that may not come, or more work for one mask than a grammar may take."""
        self.latest_s = 0.0
        """Processor time of the latest advance (`twostroke.grammar.advance`)."""
        self.is_slow = False
        """An advance took longer than grammars should. It stays so."""

    @property
    def mask(self) -> Mask:
        """The tokens that may come next, at least one unless it failed.

        End tokens are among them where the answer may end here. Nobody changes the array.
        """
        return self.compute_mask() if self._mask is None else self._mask

    @property
    def forced_token(self) -> int | None:
        """The token that must come next, if it is known without a mask. Its bit is then the mask's only one."""
        if self._is_finished:
            return self._vocabulary.end
        if not self._forced and not self._matcher.is_error():
            self._forced = self._matcher.compute_ff_tokens()[::-1]
        return self._forced[-1] if self._forced else None

    def forced_run(self, most: int) -> Sequence[int]:
        """Returns up to `most` tokens that must come next, one after the other, as far as known without a mask.

        No run is found at an end: what follows the end token is no answer.
        """
        if most <= 0 or self._is_finished or self.forced_token is None:
            return ()
        return self._forced[: -most - 1 : -1]

    def consume(self, token: int) -> None:
        """Goes on by one token of the answer."""
        self.tokens += 1
        self.replay((token,))

    def replay(self, tokens: Sequence[int]) -> None:
        """Goes on by the tokens that an earlier attempt has emitted."""
        for token in tokens:
            if self.forced_token is not None and self._forced and self._forced.pop() != token:
                self._forced.clear()
            if not self._matcher.consume_token(token) or self._matcher.is_error():
                self.failure = self.failure or self._why(token)
        self._mask = None

    def masks_along(self, drafts: Sequence[int]) -> list[Mask]:
        """Returns the mask that holds now, and the one behind each of `drafts`, all of which it permits."""
        masks = [self.mask]
        if not drafts:
            return masks
        ahead = GrammarState(self._matcher.deep_copy(), self._vocabulary, self._observe_s)
        ahead._forced = self._forced.copy()
        for token in drafts:
            began_s = time.thread_time()
            ahead.replay((token,))
            masks.append(ahead.mask)
            self.is_slow |= time.thread_time() - began_s >= SLOW_S
        return masks

    @property
    def most_drafts(self) -> int:
        """The drafted tokens whose masks take SLOW_S together, if each takes as long as the latest advance."""
        return 0 if self.is_slow else int(SLOW_S / max(self.latest_s, LEAST_S))

    def permitted_prefix(self, drafts: Sequence[int]) -> int:
        """Returns how many leading tokens of `drafts` may come next, one after the other."""
        if self._is_finished or self._matcher.is_error():
            return 0
        count: int = self._matcher.validate_tokens(list(drafts))
        return count

    def _why(self, token: int) -> str:
        """Returns why it does not go on with a token."""
        said = self._matcher.get_error() if self._matcher.is_error() else ""
        is_too_long = re.search("Too many|items; max|fuel|limit", said)
        return TOO_LONG if is_too_long else f"token {token} does not match the answer's grammar"

    def compute_mask(self) -> Mask:
        """Computes the mask now, on the thread that calls; it sets `failure` where that takes too long."""
        began_s = time.perf_counter()
        self._mask = self._found_mask()
        self._observe_s(time.perf_counter() - began_s)
        return self._mask

    def note_advance(self, seconds: float) -> None:
        """Notes the processor time that it took to go on by a token."""
        self.latest_s = seconds
        self.is_slow |= seconds >= SLOW_S

    def take_forced(self) -> int | None:
        """Returns the token that must come next, if one is known, and counts it."""
        token = self.forced_token
        self.forced_tokens += token is not None
        return token

    @property
    def _is_finished(self) -> bool:
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def _found_mask(self) -> Mask:
        mask = np.zeros(self._vocabulary.mask_words, np.uint32)
        forced = None if self._matcher.is_error() else self.forced_token
        if forced is not None:
            word, bit = divmod(forced, WORD_BITS)
            mask[word] = np.uint32(1 << bit)
            return mask
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() or not mask.any():
            self.failure = self.failure or TOO_LONG
        return mask
