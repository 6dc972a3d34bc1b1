"""How much each key may use: requests and tokens per minute, choices at once. Each router counts for itself."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from router.auth.api_keys import KeyEntry
from twostroke.base.errors import InvalidRequest, RateLimitExceeded

RETRY_S = 1.0
"""Time after which a refused client may try again: it is unknown when another choice of its key ends."""


class Bucket:
    """A minute's allowance may be used at once; what was used comes back evenly, within a minute."""

    def __init__(self, now_s: float) -> None:
        self._used = 0.0
        self._at_s = now_s

    def used(self, per_minute: float, now_s: float) -> float:
        """Returns what is used, which is more than `per_minute` where it was overdrawn."""
        self._used = max(0.0, self._used - max(0.0, now_s - self._at_s) * per_minute / 60)
        self._at_s = now_s
        return self._used

    def take(self, count: float) -> None:
        self._used += count

    def wait_s(self, count: float, per_minute: float, now_s: float) -> float:
        """Returns the seconds until `count` more fit; a limit below 1 allows one when all has come back."""
        return max(0.0, self.used(per_minute, now_s) + count - max(count, per_minute)) * 60 / per_minute


@dataclass(slots=True)
class KeyUse:
    """What one key uses."""

    requests: Bucket
    tokens: Bucket
    answers: int = 0
    """Open choices; a call has at least one, and as many as its prompts have."""


class OpenCall:
    """One call of a client, from its headers to its end."""

    def __init__(self, use: KeyUse, entry: KeyEntry) -> None:
        self._use = use
        self._most = entry.concurrency
        self._answers = 1
        use.answers += 1

    def spend(self, tokens: int) -> None:
        """Counts tokens of its prompts and outputs."""
        self._use.tokens.take(tokens)

    def widen(self, answers: int) -> None:
        """Counts the choices that it asks for.

        Raises RateLimitExceeded where others of its key leave too little room, and InvalidRequest where there never is
        enough.
        """
        more = max(answers, 1) - self._answers
        if self._most is not None and answers > self._most:
            raise InvalidRequest(
                f"n: the request asks for {answers} answers (choices of all its prompts), but its API key may have "
                f"{self._most} at once",
                field="n",
            )
        if self._most is not None and self._use.answers + more > self._most:
            raise _too_many(self._most)
        self._answers += more
        self._use.answers += more

    def leave(self) -> None:
        self._use.answers -= self._answers
        self._answers = 0


@dataclass(slots=True)
class KeyLimits:
    _uses: dict[str, KeyUse] = field(default_factory=dict)
    """Uses by id of the key."""

    def enter(self, key_id: str, entry: KeyEntry, now_s: float) -> OpenCall:
        """Counts one more call, until it leaves. Raises RateLimitExceeded."""
        use = self._uses.setdefault(key_id, KeyUse(Bucket(now_s), Bucket(now_s)))
        if entry.concurrency is not None and use.answers >= entry.concurrency:
            raise _too_many(entry.concurrency)
        per_minute = entry.requests_per_minute
        if per_minute is not None and (wait_s := use.requests.wait_s(1, per_minute, now_s)) > 0:
            raise _refusal("requests", f"{per_minute:g} requests per minute", wait_s)
        # The number of tokens is unknown before: what is used beyond the limit has to come back first.
        per_minute = entry.tokens_per_minute
        if per_minute is not None and (wait_s := use.tokens.wait_s(0, per_minute, now_s)) > 0:
            raise _refusal("tokens", f"{per_minute:g} tokens per minute", wait_s)
        use.requests.take(1)
        return OpenCall(use, entry)

    def forget_all_but(self, key_ids: Collection[str]) -> None:
        """Forgets keys that are in no file any more."""
        self._uses = {key_id: use for key_id, use in self._uses.items() if key_id in key_ids or use.answers}


def _too_many(most: int) -> RateLimitExceeded:
    return _refusal("concurrency", f"{most:g} answers at once", RETRY_S)


def _refusal(reason: str, limit: str, wait_s: float) -> RateLimitExceeded:
    return RateLimitExceeded(
        f"the API key's limit of {limit} is reached; try again in {math.ceil(wait_s)} s",
        reason=reason,
        retry_after_s=wait_s,
    )
