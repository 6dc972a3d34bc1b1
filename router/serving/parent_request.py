"""The request that the frontend passes to the dispatcher, with token ids and without text."""

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
"""Bytes of a mark. Every resume token carries one, and a fleet sees a few thousand weights at most."""


class AnswerWeights:
    """The weights that all choices of one client's request must have. The first token of any choice fixes them."""

    def __init__(self, mark: str = "") -> None:
        """`mark` is a digest of the weights. Empty: they are not fixed, as no client has a token yet."""
        self.mark = mark

    @property
    def are_fixed(self) -> bool:
        return bool(self.mark)

    def admit(self, fingerprint: str, own: bytes) -> bool:
        """Returns whether a worker with this fingerprint may compute the next token. `own` is `own_weights`."""
        return fingerprint != "" and self.mark in ("", weights_mark(fingerprint, own))

    def fix(self, fingerprint: str, own: bytes) -> bool:
        """Fixes the weights to those that computed a token. Returns False if others are fixed: drop the token."""
        if not self.admit(fingerprint, own):
            return False
        self.mark = weights_mark(fingerprint, own)
        return True


@functools.lru_cache(maxsize=1024)
def weights_mark(fingerprint: str, own: bytes) -> str:
    """Returns a digest of the fingerprint of a worker and of a request's `own_weights`, as text."""
    return hashlib.blake2b(own + fingerprint.encode(), digest_size=MARK_BYTES, person=b"answer weights").hexdigest()


def changed(request_id: str) -> WeightsChanged:
    """Returns the error of an answer that cannot continue: no worker has its weights any more."""
    return WeightsChanged(
        f"the answer {request_id} was begun with weights of its model that were replaced before its end, and cannot "
        "continue with others; send the request again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRequest:
    """One prompt of a client's request, and the choices that the client wants of it."""

    request_id: str
    """Unique among all requests that a worker may still remember. It begins with the id that the client knows."""
    request: GenerateRequest
    """The request of the first choice."""
    n: int = 1
    """Choices that the client asked for."""
    routing: RoutingParams = RoutingParams()  # noqa: RUF009  # frozen
    siblings: Siblings = Siblings()  # noqa: RUF009  # frozen
    """Siblings of the first choice: the choices of the same client request."""
    resumptions: int = 0
    """How often a client has resumed this stream. If it has, decode workers may still have it."""
    ended_choices: frozenset[int] = frozenset()
    """Choices whose end the client has received: they are not generated again."""
    is_resumable: bool = False
    """Whether the client can resume it at another router."""
    weights: AnswerWeights = field(default_factory=AnswerWeights, compare=False)
    """The weights that the answer must have. All prompts of a client's request share this object."""
    trace: TraceContext | None = None
    """The span that this is part of. None: it is not traced."""

    @property
    def open_choices(self) -> list[int]:
        return [choice for choice in range(self.n) if choice not in self.ended_choices]


def until(
    deadline_s: float | None, had_passed: str, passed: Callable[[], str]
) -> contextlib.AbstractAsyncContextManager[None]:
    """Raises DeadlineExceeded inside once `deadline_s` (Unix seconds) is reached.

    The message is `had_passed` if the deadline passed before, or what `passed` returns if it passed inside.
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
"""Takes (choice, delta) and returns True, or does nothing and returns False."""


def take_none(choice: int, delta: TokenDelta) -> bool:
    return False


CLOCK_BITS = 52
"""Low bits of an attempt number, for the clock: they hold microseconds since 1970 until 2112."""
MOST_RESUMPTIONS = (1 << 12) - 1
"""Limit on the resumptions of a stream: the bits that the clock leaves of 64."""


def first_attempt(resumptions: int) -> int:
    """Returns the lowest attempt number of a stream that was resumed so often.

    It is higher than every number of a router that still serves the stream as it was before, whatever their clocks.
    """
    return resumptions << CLOCK_BITS


class Attempts:
    """Numbers attempts by the wall clock: late messages of an earlier request with the same id are recognised."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._latest = -1

    def next(self, at_least: int = 0) -> int:
        """Returns the next number. `at_least` is `first_attempt`, or one more than a recovered attempt."""
        begin = first_attempt(at_least >> CLOCK_BITS)
        self._latest = max(self._latest + 1, self._clock_ns() // 1000, at_least - begin)
        return begin + self._latest
