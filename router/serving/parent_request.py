"""What the frontend hands to the dispatcher, and the dispatcher as the frontend sees it: token ids only, no text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.admission.queued_request import Siblings
from router.fleet.adapters import Adapters
from router.fleet.serving_facts import ServingFacts
from router.fleet.worker import Worker
from router.fleet.worker_link import TokenDelta
from router.routing.selector import RoutingParams
from router.serving.answer_weights import AnswerWeights
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.request import GenerateRequest
from twostroke.rpc.v1.control_pb2 import (
    ForgetCachedResponse,
    GetTraceResponse,
    KvEventBatch,
    ProfilePart,
    ProfileRequest,
    SubscribeKvEventsRequest,
    WorkerLoad,
)
from twostroke.tracing.context import TraceContext


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
    """Those of the first choice."""
    resumptions: int = 0
    """How often a client has resumed this stream; if ever, decode workers may still have it."""
    ended_choices: frozenset[int] = frozenset()
    """Choices whose end the client has: nothing is wanted of them."""
    is_resumable: bool = False
    """The client can resume it at another router."""
    weights: AnswerWeights = field(default_factory=AnswerWeights, compare=False)
    """The weights that answer, once a token has come; all prompts of a client's request share them."""
    trace: TraceContext | None = None
    """The span that this is part of. None: nobody follows it."""

    @property
    def open_choices(self) -> list[int]:
        return [choice for choice in range(self.n) if choice not in self.ended_choices]


Take = Callable[[int, TokenDelta], bool]
"""Takes a delta of a choice at once, or returns False."""


def take_none(choice: int, delta: TokenDelta) -> bool:
    return False


class Dispatcher(Protocol):
    """Owns open requests: places them on workers and carries their tokens back."""

    @property
    def facts(self) -> ServingFacts:
        """Raises PeerLost while no decode worker is known."""

    @property
    def adapters(self) -> Adapters:
        """Adapters that are served beside the model, by name."""

    async def wait_for_adapters(self, holds: Callable[[Adapters], bool], timeout_s: float) -> None:
        """Waits until `holds` is true of the adapters that are served, or until `timeout_s` has passed."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def knows_decode_worker(self) -> bool:
        """A decode worker is there, though it may be silent since a moment, or drain."""

    @property
    def is_draining(self) -> bool: ...

    def generate(self, request: ParentRequest, take: Take = take_none) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """Yields (choice, delta) from the first token on, also of a stream that is resumed, until every choice ends.

        Tokens that come while nothing waits to be yielded are given to `take` first, at once and without a task. What
        it returns False for is yielded, and so is every end.

        Raises ServeError. Closing the iterator (`aclose`, or cancelling its consumer) cancels the request everywhere.
        """

    def finish_early(self, request: ParentRequest, choice: int) -> None:
        """A stop string was found: that choice needs no more tokens. Its end (STOP) follows at once."""

    async def abort(self, request_id: str) -> bool:
        """Ends an open request, whose iterator then raises Cancelled. Returns False where no request has this id."""

    def loads(self) -> list[WorkerLoad]: ...

    def workers(self) -> Sequence[Worker]:
        """Returns the workers as the fleet knows them now: to be read, at once, and not to be kept."""

    def holders(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, tuple[int, ...]]:
        """Returns how many of the first of these blocks each worker holds down to each tier."""

    def subscribe(self, request: SubscribeKvEventsRequest) -> AsyncIterator[KvEventBatch]: ...

    async def trace(self, name: str) -> GetTraceResponse:
        """Returns what this router and its workers know of a request, or of a stream."""

    def profile(self, request: ProfileRequest) -> AsyncGenerator[ProfilePart, None]:
        """Records for some seconds where time goes, here and at the workers, then yields it process by process."""

    async def forget_cached(self) -> ForgetCachedResponse:
        """Lets every worker forget the blocks that no request uses now and no pin keeps. Returns how many those were,
        and how many are left because of a pin."""

    async def drain(self, deadline_s: float) -> int:
        """Takes no new work, and waits for open requests until `deadline_s` (Unix seconds). Returns those left."""
