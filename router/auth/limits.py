"""Limits of API keys: requests and tokens per minute, choices at once. All routers of a launcher count together."""

from __future__ import annotations

import math

from router.auth.api_keys import KeyEntry
from router.auth.key_uses import KeyUse, KeyUses
from twostroke.base.errors import InvalidRequest, RateLimitExceeded

TOGETHER_TOKENS = 16
"""Tokens after which a call updates the shared count. Its end counts the rest."""
RETRY_S = 1.0
"""Seconds after which a client may try again when its key has too many choices: nobody knows when one ends."""


class OpenCall:
    """One call of a client, from its headers to its end, and what it counts for its key."""

    def __init__(self, uses: KeyUses, key_id: str, entry: KeyEntry, now_s: float) -> None:
        """Use `KeyLimits.enter`, which has counted the call as one open choice."""
        self._uses = uses
        self._key_id = key_id
        self._most = entry.concurrency
        self._counts_tokens = entry.tokens_per_minute is not None
        self._answers = 1
        self._now_s = now_s
        self._tokens = 0
        """Tokens that the shared count does not include yet."""

    def spend(self, tokens: int) -> None:
        """Counts tokens of its prompts and outputs."""
        self._tokens += tokens
        if self._tokens >= TOGETHER_TOKENS and self._counts_tokens:
            with self._uses.use_of(self._key_id, self._now_s) as use:
                self._count_tokens(use)

    def widen(self, answers: int) -> None:
        """Counts the choices that the call requests.

        Raises RateLimitExceeded if other calls of the key leave too few, and InvalidRequest if the limit is lower.
        """
        more = max(answers, 1) - self._answers
        if self._most is not None and answers > self._most:
            raise InvalidRequest(
                f"n: the request asks for {answers} answers (choices of all its prompts), but its API key may have "
                f"{self._most} at once",
                field="n",
            )
        if self._most is None or not more:
            return
        with self._uses.use_of(self._key_id, self._now_s) as use:
            if use.answers + more > self._most:
                raise _too_many(self._most)
            use.answers += more
            self._answers += more

    def leave(self) -> None:
        with self._uses.use_of(self._key_id, self._now_s) as use:
            self._count_tokens(use)
            use.answers -= self._answers
        self._answers = 0

    def _count_tokens(self, use: KeyUse) -> None:
        if self._counts_tokens:
            use.tokens.take(self._tokens)
        self._tokens = 0


class KeyLimits:
    def __init__(self, uses: KeyUses | None = None) -> None:
        self._uses = uses or KeyUses()

    def enter(self, key_id: str, entry: KeyEntry, now_s: float) -> OpenCall:
        """Counts a call until its `leave`. Raises RateLimitExceeded."""
        with self._uses.use_of(key_id, now_s) as use:
            if entry.concurrency is not None and use.answers >= entry.concurrency:
                raise _too_many(entry.concurrency)
            per_minute = entry.requests_per_minute
            if per_minute is not None and (wait_s := use.requests.wait_s(1, per_minute, now_s)) > 0:
                raise _refusal("requests", f"{per_minute:g} requests per minute", wait_s)
            # The call's tokens are not known yet. So it may begin, unless earlier calls have exceeded the limit.
            per_minute = entry.tokens_per_minute
            if per_minute is not None and (wait_s := use.tokens.wait_s(0, per_minute, now_s)) > 0:
                raise _refusal("tokens", f"{per_minute:g} tokens per minute", wait_s)
            use.requests.take(1)
            use.answers += 1
        return OpenCall(self._uses, key_id, entry, now_s)


def _too_many(most: int) -> RateLimitExceeded:
    return _refusal("concurrency", f"{most:g} answers at once", RETRY_S)


def _refusal(reason: str, limit: str, wait_s: float) -> RateLimitExceeded:
    return RateLimitExceeded(
        f"the API key's limit of {limit} is reached; try again in {math.ceil(wait_s)} s",
        reason=reason,
        retry_after_s=wait_s,
    )
