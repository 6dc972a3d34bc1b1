"""A grammar state knows which tokens may come next in one answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from twostroke.base.token_mask import WORD_BITS, Mask
from twostroke.grammar.vocabulary import MOST_DIGITS, Vocabulary

TOO_LONG = "the answer's grammar takes too long to follow from here on"
DEAD_END = (
    "the answer's grammar has a dead end: no text that continues from here matches it, and the text so far does not; "
    "mend the grammar, or leave out what cannot follow"
)
FULL_LEXER = "too many states"
"""Part of llguidance's message where all answers of a compiled grammar together have used up its lexer."""
LEAST_RENEWED_TOKENS = 16
"""Least tokens that an answer's own matcher must last. A grammar that uses up a lexer sooner is too much work."""
SLOW_S = 0.002
"""Processor time of one advance after which a grammar advances separately from others, and has no proposed tokens."""
LEAST_S = SLOW_S / 16
"""Least processor time that the next advance is expected to take, however quick the latest one was."""


class GrammarState:
    """The state of a grammar in one answer: a function of the grammar and of the tokens that were consumed.

    Its methods are called by one thread at a time. The mask is computed when it is first asked for, because no mask is
    needed after a forced token.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        observe_s: Callable[[float], None],
        new_matcher: Callable[[], LLMatcher],
        *,
        bounds_digits: bool = False,
    ) -> None:
        """`observe_s` gets the seconds that each mask took.

        `matcher` shares its lexer with other answers. `new_matcher` returns one with a lexer of its own.
        `bounds_digits`: whether a run of digits ends after `MOST_DIGITS` where something else may come.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._observe_s = observe_s
        self._new_matcher = new_matcher
        self._bounds_digits = bounds_digits
        self._answer: list[int] = []
        """All tokens so far: a new matcher reads them again."""
        self._renewed_at: int | None = None
        """How many tokens there were when the matcher was last replaced."""
        self._digits = 0
        """Digits at the end of the text."""
        self._mask: Mask | None = None
        self._forced: list[int] = []
        """Tokens that must come next, in reverse order.

        Finding a run takes as long as the run, so it is found once. A run that is found later may have other tokens
        than the rest of this one. So each run is found as soon as there is one, also when an answer is replayed or only
        masks are wanted.
        """
        self.tokens = 0
        """Tokens consumed, without those of earlier attempts."""
        self.forced_tokens = 0
        """Tokens that were taken because no other could come."""
        self.failure: str | None = None
        """Why the answer cannot continue: a token that may not come, or too much work for a mask."""
        self.latest_s = 0.0
        """Processor time of the latest advance (`twostroke.grammar.advance`)."""
        self.is_slow = False
        """Whether an advance ever took SLOW_S or longer. Once true, it stays true."""

    @property
    def mask(self) -> Mask:
        """The tokens that may come next, at least one unless the grammar failed.

        End tokens are among them where the answer may end here. The array must not be changed.
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

        No run is found at an end: what follows the end token is not an answer.
        """
        if most <= 0 or self._is_finished or self.forced_token is None:
            return ()
        return self._forced[: -most - 1 : -1]

    def consume(self, token: int) -> None:
        """Advances by one token of the answer."""
        self.tokens += 1
        self.replay((token,))

    def replay(self, tokens: Sequence[int]) -> None:
        """Advances by the tokens that an earlier attempt has emitted."""
        for token in tokens:
            if self.forced_token is not None and self._forced and self._forced.pop() != token:
                self._forced.clear()
            if not self._read(token):
                self.failure = self.failure or self._why(token)
            self._answer.append(token)
            self._digits = self._vocabulary.digits.run_after(self._digits, token)
        self._mask = None

    def end(self, token: int) -> None:
        """Ends the answer with a token; sets `failure` where that is an end token and the text does not match.

        A grammar may name an end token in its middle.
        """
        if token not in self._vocabulary.ends or self._is_finished:
            return
        if not self._read(token):
            self.failure = self.failure or self._why(token)
        elif not self._matcher.is_accepting():
            self.failure = self.failure or DEAD_END

    def masks_along(self, proposed: Sequence[int]) -> list[Mask]:
        """Returns the mask now and after each of `proposed`, which it permits. It is empty after a dead end."""
        masks = [self.mask]
        if not proposed:
            return masks
        ahead = self._copy()
        for token in proposed:
            began_s = time.thread_time()
            ahead.replay((token,))
            masks.append(ahead.mask)
            self.is_slow |= time.thread_time() - began_s >= SLOW_S
        return masks

    @property
    def most_proposed(self) -> int:
        """Number of proposed tokens whose masks take SLOW_S together, if each takes as long as the latest advance."""
        return 0 if self.is_slow else int(SLOW_S / max(self.latest_s, LEAST_S))

    def permitted_prefix(self, proposed: Sequence[int]) -> int:
        """Returns how many leading tokens of `proposed` may come next, one after the other."""
        if self._is_finished or self._matcher.is_error():
            return 0
        count: int = self._matcher.validate_tokens(list(proposed))
        return count

    def _why(self, token: int) -> str:
        """Returns why a token may not come next."""
        problem = self._matcher.get_error() if self._matcher.is_error() else ""
        is_too_long = re.search("[Tt]oo many|items; max|fuel|limit", problem)
        return TOO_LONG if is_too_long else f"token {token} does not match the answer's grammar"

    def compute_mask(self) -> Mask:
        """Computes the mask on the calling thread. It sets `failure` where no token may come or that takes too long."""
        began_s = time.perf_counter()
        self._mask = self._found_mask()
        self._observe_s(time.perf_counter() - began_s)
        return self._mask

    def note_advance(self, seconds: float) -> None:
        """Notes the processor time that advancing by a token took."""
        self.latest_s = seconds
        self.is_slow |= seconds >= SLOW_S

    def take_forced(self) -> int | None:
        """Returns the token that must come next, if one is known, and counts it."""
        token = self.forced_token
        self.forced_tokens += token is not None
        return token

    @property
    def _is_finished(self) -> bool:
        """Whether the text matches and nothing may follow it."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error() and self._matcher.is_accepting())

    def _read(self, token: int) -> bool:
        """Advances the matcher by a token, and returns whether the token may come."""
        while not (is_read := self._matcher.consume_token(token) and not self._matcher.is_error()):
            if not self._renew():
                break
        return is_read

    def _renew(self) -> bool:
        """Replaces a matcher that has a full lexer, and returns whether it did.

        Other answers may have filled the lexer, but the limit on a grammar's work holds for each answer alone.
        """
        if FULL_LEXER not in self._matcher.get_error():
            return False
        count = len(self._answer)
        if self._renewed_at is not None and count - self._renewed_at < LEAST_RENEWED_TOKENS:
            return False
        matcher, self._renewed_at = self._new_matcher(), count
        if matcher.is_error() or not matcher.consume_tokens(self._answer):
            return False
        self._matcher = matcher
        return True

    def _copy(self) -> GrammarState:
        """Returns a copy that advances independently of this one."""
        copy = GrammarState(
            self._matcher.deep_copy(),
            self._vocabulary,
            self._observe_s,
            self._new_matcher,
            bounds_digits=self._bounds_digits,
        )
        copy._forced, copy._answer = self._forced.copy(), self._answer.copy()
        copy._renewed_at, copy._digits = self._renewed_at, self._digits
        return copy

    def _found_mask(self) -> Mask:
        mask = self._matching()
        while self._matcher.is_error() and self._renew():
            mask = self._matching()
        if not self._matcher.is_error() and mask.any():
            return mask
        self.failure = self.failure or self._why_nothing()
        return np.zeros_like(mask)  # the matcher permits the end token where it has failed

    def _matching(self) -> Mask:
        mask = np.zeros(self._vocabulary.mask_words, np.uint32)
        forced = None if self._matcher.is_error() else self.forced_token
        if forced is not None:
            word, bit = divmod(forced, WORD_BITS)
            mask[word] = np.uint32(1 << bit)
        elif not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._bounds_digits and self._digits >= MOST_DIGITS:
                mask = self._vocabulary.digits.without_more(mask, self._may_end_with)
        return mask

    def _may_end_with(self, digit: int) -> bool:
        """Returns whether anything but a digit may come after this digit."""
        ahead, mask = self._matcher.deep_copy(), np.zeros(self._vocabulary.mask_words, np.uint32)
        if not ahead.consume_token(digit):
            return False
        ahead.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return not ahead.is_error() and not self._vocabulary.digits.are_all(mask)

    def _why_nothing(self) -> str:
        """Returns why no token may come next."""
        problem = self._matcher.get_error() if self._matcher.is_error() else ""
        return DEAD_END if not problem or problem.startswith("NoExtension") else TOO_LONG
