"""What the front door hands to dispatch and what comes back: token ids only, no text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from router.fleet.serving_facts import ServingFacts
from twostroke.request import FinishReason, SampledToken, SamplingParams, Siblings
from twostroke.rpc.v1.control_pb2 import GetTraceResponse, KvEventBatch, SubscribeKvEventsRequest, WorkerLoad
from twostroke.tracing.context import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and the answers wanted for it."""

    request_id: str
    """Begins with the id that the client knows; unique among the requests that any worker may still remember."""
    prompt: tuple[int, ...]
    salt: bytes = b""
    """Of whoever may share the prompt's blocks, past the public ones."""
    public_blocks: int = 0
    """The first of the prompt's blocks, which everybody shares."""
    sampling: tuple[SamplingParams, ...]
    """One per choice; they differ in `choice` only."""
    deadline_s: float | None
    """Seconds since the Unix epoch."""
    priority: int = 0
    """Class: higher goes first where requests have to wait."""
    tenant: str = ""
    """Requests that have to wait are taken from tenants in turns."""
    siblings: Siblings = Siblings()  # noqa: RUF009  # frozen
    """Of the prompt's first choice."""
    resumptions: int = 0
    """How often a client has gone on with this stream; if ever, decode workers may still have its answers."""
    settled: frozenset[int] = frozenset()
    """Choices whose end the client has: nothing is wanted of them."""
    is_resumable: bool = False
    """Its client can go on with it at another router."""
    trace: TraceContext | None = None
    """The span that it is part of."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one choice; `position` counts from 0 in that choice's answer."""

    index: int
    position: int
    token: SampledToken


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of one choice: no more of its tokens follow."""

    index: int
    reason: FinishReason
    cached_tokens: int
    """Prompt tokens whose KV was not computed for this request."""


class Dispatcher(Protocol):
    """Owner of open requests: places them on workers and carries their tokens back."""

    @property
    def facts(self) -> ServingFacts:
        """Raises PeerLost while no decode worker is known."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_draining(self) -> bool: ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        """Tokens of all choices as they come, and one FinishEvent per choice; from the first token on, also of a stream
        that is resumed.

        Raises ServeError. Closing the iterator (`aclose`, or cancelling its consumer) cancels the request everywhere.
        """

    async def finish_early(self, request: GenerationRequest, index: int) -> None:
        """A stop string was found: that choice needs no more tokens. Its FinishEvent (STOP) follows at once."""

    async def abort(self, request_id: str) -> bool:
        """End an open request, whose iterator then raises Cancelled; False where none has this id."""

    def loads(self) -> list[WorkerLoad]: ...

    def subscribe(self, request: SubscribeKvEventsRequest) -> AsyncIterator[KvEventBatch]: ...

    async def trace(self, name: str) -> GetTraceResponse:
        """What this router and its workers know of a request, or of a stream."""

    async def forget_cached(self) -> int:
        """Let every worker forget the blocks that nobody uses now; returns how many that were."""

    async def drain(self, deadline_s: float) -> int:
        """Take no new work, wait for open requests until `deadline_s` (Unix seconds); how many were left."""
