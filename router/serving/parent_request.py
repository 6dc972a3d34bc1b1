"""What the frontend hands to the dispatcher: token ids only, no text."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from router.admission.queued_request import Siblings
from router.fleet.token_stream import TokenDelta
from router.routing.selector import RoutingParams
from twostroke.base.errors import DeadlineExceeded, WeightsChanged
from twostroke.request import GenerateRequest
from twostroke.tracing.span import TraceContext

MARK_BYTES = 8
"""Bytes of a mark, which every resume token carries: a fleet has seen some thousand weights at most."""


class AnswerWeights:
    """The weights of all choices of one client's request. They are free until the first token of any choice."""

    def __init__(self, mark: str = "") -> None:
        """`mark` is that of the tokens that the client of a resumed stream has; empty where it has none."""
        self.mark = mark

    @property
    def are_fixed(self) -> bool:
        return bool(self.mark)

    def admit(self, fingerprint: str, own: bytes) -> bool:
        """Returns whether a worker with this fingerprint may compute the next token. `own` is the request's."""
        return fingerprint != "" and self.mark in ("", weights_mark(fingerprint, own))

    def fix(self, fingerprint: str, own: bytes) -> bool:
        """Notes that a token was computed by a worker with this fingerprint. Returns False where it must not count."""
        if not self.admit(fingerprint, own):
            return False
        self.mark = weights_mark(fingerprint, own)
        return True


@functools.lru_cache(maxsize=1024)
def weights_mark(fingerprint: str, own: bytes) -> str:
    """Returns a digest of the fingerprint of a worker and of a request's `own_weights`, as text."""
    return hashlib.blake2b(own + fingerprint.encode(), digest_size=MARK_BYTES, person=b"answer weights").hexdigest()


def changed(request_id: str) -> WeightsChanged:
    """Returns the error of an answer that only weights could continue with that no worker has any more."""
    return WeightsChanged(
        f"the answer {request_id} was begun with weights of its model that were replaced before its end, and cannot "
        "continue with others; send the request again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRequest:
    """One prompt of a client's request, and which choices are wanted of it."""

    request_id: str
    """Begins with the id that the client knows; unique among the requests that any worker may still remember."""
    request: GenerateRequest
    """What is wanted of the first choice."""
    n: int = 1
    """Choices that the client asked for."""
    routing: RoutingParams = RoutingParams()  # noqa: RUF009  # frozen
    siblings: Siblings = Siblings()  # noqa: RUF009  # frozen
    """Siblings of the first choice: the choices of the same client request."""
    resumptions: int = 0
    """How often a client has resumed this stream; if ever, decode workers may still have it."""
    ended_choices: frozenset[int] = frozenset()
    """Choices whose end the client has: nothing is wanted of them."""
    is_resumable: bool = False
    """Whether the client can resume it at another router."""
    weights: AnswerWeights = field(default_factory=AnswerWeights, compare=False)
    """The weights that answer, once a token has come; all prompts of a client's request share them."""
    trace: TraceContext | None = None
    """The span that this is part of. None: nobody follows it."""

    @property
    def open_choices(self) -> list[int]:
        return [choice for choice in range(self.n) if choice not in self.ended_choices]


def until(
    deadline_s: float | None, had_passed: str, passed: Callable[[], str]
) -> contextlib.AbstractAsyncContextManager[None]:
    """Raises DeadlineExceeded inside once `deadline_s` (Unix seconds) is reached.

    `had_passed` is said where it was before, and what `passed` returns where it was meanwhile.
    """
    return contextlib.nullcontext() if deadline_s is None else _until(deadline_s, had_passed, passed)


@contextlib.asynccontextmanager
async def _until(deadline_s: float, had_passed: str, passed: Callable[[], str]) -> AsyncIterator[None]:
    left_s = deadline_s - time.time()
    if left_s <= 0:
        raise DeadlineExceeded(had_passed)
    try:
        async with asyncio.timeout(left_s) as timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise DeadlineExceeded(passed()) from error


Take = Callable[[int, TokenDelta], bool]
"""Takes a delta of a choice at once, or returns False."""


def take_none(choice: int, delta: TokenDelta) -> bool:
    return False


CLOCK_BITS = 52
"""Bits for the clock: microseconds since 1970 fit in until 2112."""
MOST_RESUMPTIONS = (1 << 12) - 1
"""Limit on the resumptions of a stream: the bits that the clock leaves of 64."""


def first_attempt(resumptions: int) -> int:
    """Returns the least number of a stream that was resumed so often.

    A router that does not know that its client has gone to another one stays behind, whatever its clock says.
    """
    return resumptions << CLOCK_BITS


class Attempts:
    """Numbers follow the wall clock: a late Close or token of an earlier request with the same id is recognised."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._latest = -1

    def next(self, at_least: int = 0) -> int:
        """Returns the next number. `at_least` is `first_attempt`, or one more than an attempt that was found."""
        begin = first_attempt(at_least >> CLOCK_BITS)
        self._latest = max(self._latest + 1, self._clock_ns() // 1000, at_least - begin)
        return begin + self._latest
