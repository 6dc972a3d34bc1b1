"""What the frontend hands to the dispatcher, and the dispatcher as the frontend sees it: token ids only, no text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.fleet.adapters import Adapters
from router.fleet.serving_facts import ServingFacts
from router.fleet.worker import Worker
from router.fleet.worker_link import TokenDelta
from twostroke.config import SPECULATE_AUTO
from twostroke.ids import BlockHash, WorkerId
from twostroke.request import AdapterRef, CacheHint, SamplingParams, Siblings
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
class GenerateRequest:
    """One prompt and the choices wanted for it."""

    request_id: str
    """Begins with the id that the client knows; unique among the requests that any worker may still remember."""
    prompt: tuple[int, ...]
    salt: bytes = b""
    """Says who may share the prompt's blocks, past the public ones."""
    public_blocks: int = 0
    """How many of the prompt's first blocks everyone shares."""
    adapter: AdapterRef | None = None
    """Computes the answer; None: the model alone."""
    takes_converted: bool = True
    """It may be served by pages that were converted from another form."""
    speculation: str = SPECULATE_AUTO
    """It says who may propose its tokens: auto, off, or a drafter."""
    cache_key: bytes = b""
    """Digest of the client's hint which requests have prefixes in common; it says nothing about who shares blocks."""
    hints: tuple[CacheHint, ...] = ()
    sampling: tuple[SamplingParams, ...]
    """One per choice; they differ in `choice` only."""
    deadline_s: float | None
    """Seconds since the Unix epoch."""
    priority: int = 0
    """Class of the request: a higher one goes first where requests have to wait."""
    tenant: str = ""
    """Tenants take turns where requests have to wait."""
    hint_tenant: str = ""
    """Its hints count for this tenant, which no client can choose anew with each request, as it can a user."""
    siblings: Siblings = Siblings()  # noqa: RUF009  # frozen
    """Siblings of the prompt's first choice."""
    resumptions: int = 0
    """How often a client has resumed this stream; if ever, decode workers may still have it."""
    ended_choices: frozenset[int] = frozenset()
    """Choices whose end the client has: nothing is wanted of them."""
    is_resumable: bool = False
    """The client can resume it at another router."""
    trace: TraceContext | None = None
    """The span that it is part of."""

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of the prompt come with the first token of each choice."""
        return self.sampling[0].prompt_logprobs is not None and len(self.prompt) > 1


Take = Callable[[int, TokenDelta], bool]
"""Takes a delta of a choice at once, or returns False."""


def take_nothing(choice: int, delta: TokenDelta) -> bool:
    return False


class Dispatcher(Protocol):
    """Owns open requests: places them on workers and carries their tokens back."""

    @property
    def facts(self) -> ServingFacts:
        """Raises PeerLost while no decode worker is known."""

    @property
    def adapters(self) -> Adapters:
        """Adapters that are served beside the model, by name."""

    async def until_adapters(self, holds: Callable[[Adapters], bool], timeout_s: float) -> None:
        """Returns once that is so of the adapters, or when the time is over."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def hears_workers(self) -> bool:
        """A decode worker is there, though it may be silent since a moment, or drain."""

    @property
    def is_draining(self) -> bool: ...

    def generate(
        self, request: GenerateRequest, take: Take = take_nothing
    ) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """Yields (choice, delta) from the first token on, also of a stream that is resumed, until every choice ends.

        Tokens that come while nothing waits to be yielded are given to `take` first, at once and without a task. What
        it returns False for is yielded, and so is every end.

        Raises ServeError. Closing the iterator (`aclose`, or cancelling its consumer) cancels the request everywhere.
        """

    def finish_early(self, request: GenerateRequest, choice: int) -> None:
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
