"""One choice of one request, from its first placement to its last token, over as many decode workers as it takes.

Everything that must survive a decode worker is here: prompt, tokens sent so far, names of their blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.fleet.demand import Demand
from router.fleet.link_pool import LinkPool
from router.fleet.token_stream import AnswerStream, Arrival
from router.metrics import RouterMetrics
from router.serving.attempts import first_attempt
from router.serving.generate_request import FinishEvent, GenerationRequest, TokenEvent
from router.serving.migration import Moved, Movement
from router.serving.placement import Placed, Placer, may_go_elsewhere
from router.serving.recovery import Found
from router.serving.request_log import RecordSink
from router.serving.request_stats import Account, Asked
from twostroke.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineLost,
    InternalError,
    InvalidRequest,
    NotFound,
    ServeError,
    StepFailed,
)
from twostroke.fault_points import Point, reach
from twostroke.ids import BlockName, RequestId, WorkerId
from twostroke.kv_cache.block import extend_names
from twostroke.lifetime import Instant, Lifetime
from twostroke.request import FinishReason, Request, SampledToken
from twostroke.tracing.recorder import Recorder

log = logging.getLogger(__name__)

MOST_FAILED_STEPS = 2
"""A request that two workers could not compute would fail at the third one, too."""
MOST_LOST_ENGINES = 3
"""Workers whose engine failed, one after the other without a new token. The request that did it must end before it has
been everywhere; others that were beside it each time are few."""
MAX_LOSSES = 5
"""Workers lost one after the other without a new token: by then the request itself is the likely killer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all answers of a router share."""

    router_id: str
    block_size: int
    policy: str
    placer: Placer
    links: LinkPool
    movement: Movement
    metrics: RouterMetrics
    request_log: RecordSink
    demand: Demand
    recorder: Recorder


_GOOD_ENDS = frozenset({*FinishReason, "cancelled"}) - {FinishReason.ERROR}
"""Cancelled: a stop string was found, or nobody wants it any more."""


class Answer:
    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        names: tuple[BlockName, ...],
        around: Surroundings,
        report: Callable[[TokenEvent | FinishEvent | ServeError], None],
        found: Found | None = None,
    ) -> None:
        """`found` is what a decode worker has of it already, when a client goes on with its stream."""
        self.index = index
        self.request_id = RequestId(f"{request.request_id}#{index}")
        self._request = request
        self._names = list(names)
        self._around = around
        self._report = report
        self._found = found
        self._sampling = request.sampling[index]
        self._least_attempt = first_attempt(request.resumptions)
        self._is_left_open = False
        self._emitted: list[SampledToken] = []
        self._lifetime = Lifetime()
        self._lifetime.mark(Instant.RECEIVED)
        asked = Asked(
            request_id=self.request_id,
            prompt_tokens=len(request.prompt),
            names=names,
            block_size=around.block_size,
            policy=around.policy,
            tenant=request.tenant,
            priority=request.priority,
        )
        self._account = Account(asked, self._lifetime)
        if found is None:  # else another router has told of it
            around.demand.begins()
        self._span = around.recorder.begin("answer", request.request_id, request.trace)

    @property
    def cached_tokens(self) -> int:
        return self._account.cached_tokens

    def leave_open(self) -> None:
        """Cancelling does not close it at its decode worker: somebody will attach to it there."""
        self._is_left_open = True

    @property
    def has_begun(self) -> bool:
        return bool(self._emitted)

    def note_end(self) -> None:
        """With its last token, or because its caller has what it wants: the next ones are expected to be like it."""
        self._around.placer.answered(len(self._emitted))
        self._around.demand.ends(len(self._request.prompt), self.cached_tokens, len(self._emitted))

    async def run(self) -> None:
        """Reports tokens and one finish, or one error. Only cancelling ends it without either."""
        outcome = "cancelled"
        try:
            reason = await self._until_deadline()
            outcome = reason.value
            self.note_end()
            self._report(FinishEvent(self.index, reason, self.cached_tokens))
        except ServeError as error:
            outcome = type(error).__name__
            self._report(error)
        except Exception as error:
            log.exception("answer failed request=%s", self.request_id)
            outcome = "InternalError"
            self._report(InternalError(f"internal error: {type(error).__name__}: {error}"))
        finally:
            self._lifetime.mark(Instant.DONE)
            self._settle(outcome)

    async def _until_deadline(self) -> FinishReason:
        deadline_s = self._request.deadline_s
        left_s = None if deadline_s is None else deadline_s - time.time()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed before it could be placed")
        try:
            async with asyncio.timeout(left_s) as limit:
                return await self._over_attempts()
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the request's deadline passed after {len(self._emitted)} tokens of choice {self.index}"
            ) from None

    async def _over_attempts(self) -> FinishReason:
        taken: Placed | None = None
        if self._found is not None:
            self._begin_with(self._found)
            if self._found.finish not in (None, FinishReason.ERROR):
                return self._found.finish
            taken = await self._take_over(self._found)
        losses = failed_steps = lost_engines = 0
        next_worker: WorkerId | None = None
        avoided: WorkerId | None = None
        while len(self._emitted) < self._sampling.max_tokens:
            before = len(self._emitted)
            placed, taken = taken or await self._place(next_worker, avoided), None
            next_worker = avoided = None
            self._account.placed(placed.decision, placed.decided_at_s)
            try:
                return await self._relay(placed)
            except Moved as moved:
                next_worker = moved.to
                self._span.event("moved", worker=placed.link.worker, to=moved.to or "any")
            except ServeError as error:
                losses = losses + 1 if len(self._emitted) == before else 1
                if not may_go_elsewhere(error) or losses > MAX_LOSSES:
                    raise
                if isinstance(error, EngineLost):
                    lost_engines = lost_engines + 1 if len(self._emitted) == before else 1
                    if lost_engines == MOST_LOST_ENGINES:
                        raise InternalError(f"{lost_engines} workers lost their engines: {error.message}") from error
                if isinstance(error, StepFailed):
                    avoided, failed_steps = placed.link.worker, failed_steps + 1
                    if failed_steps == MOST_FAILED_STEPS:
                        raise InternalError(f"{failed_steps} attempts failed alike: {error.message}") from error
                self._around.metrics.reopened_requests_total.inc()
                self._span.event("reopened", lost_worker=placed.link.worker, error=repr(error))
                log.warning(
                    "reopening request=%s after_tokens=%d lost_worker=%s error=%s: %s",
                    self.request_id,
                    len(self._emitted),
                    placed.link.worker,
                    type(error).__name__,
                    error,
                )
        return FinishReason.LENGTH

    async def _place(self, at: WorkerId | None, avoided: WorkerId | None) -> Placed:
        has_had_turn = self._account.attempts > 0 or self._found is not None
        span = self._span.begin("route")
        try:
            placed = await self._around.placer.place(
                self._request_now(), self._lifetime, span, has_had_turn=has_had_turn, at=at, avoided=avoided
            )
        except BaseException as error:
            span.end(error=repr(error))
            raise
        span.end()
        return placed

    def _begin_with(self, found: Found) -> None:
        """Tell what another router has had already."""
        self._sampling = dataclasses.replace(self._sampling, max_tokens=found.most_tokens)
        self._least_attempt = max(self._least_attempt, found.attempt + 1)
        self._account.arrived(0, found.cached_tokens, time.monotonic())
        self._tell(found.tokens)

    async def _take_over(self, found: Found) -> Placed | None:
        """From the router that had it; None where it has to be placed again."""
        if found.finish is not None:
            return None
        attempt = self._around.placer.attempts.next(self._least_attempt)
        stream, is_taken = AnswerStream(self.request_id, attempt, len(self._emitted)), False
        try:
            await found.link.take_over(stream, found.attempt, self._request.deadline_s)
            is_taken = True
            self._span.event("taken over", worker=found.link.worker, tokens=len(self._emitted))
            return Placed(found.link, stream, None, time.monotonic())
        except ServeError as error:
            is_another_attempt = isinstance(error, NotFound | InvalidRequest | Cancelled)  # the one found is over
            if not may_go_elsewhere(error) and not is_another_attempt:
                raise
            log.warning("not taken over request=%s worker=%s error=%s", self.request_id, found.link.worker, error)
            return None
        finally:
            if not is_taken:
                found.link.forget(stream)
                self._around.links.close_later(found.link, stream)

    def _request_now(self) -> Request:
        """What is known so far; placing numbers the attempt."""
        known = (*self._request.prompt, *(sampled.token for sampled in self._emitted))
        extend_names(
            self._names, known, self._around.block_size, self._request.salt, self._request.public_blocks
        )  # those that the answer has filled since
        return Request(
            request_id=self.request_id,
            attempt=self._least_attempt,
            prompt=self._request.prompt,
            emitted=tuple(self._emitted),
            names=tuple(self._names),
            salt=self._request.salt,
            public_blocks=self._request.public_blocks,
            sampling=self._sampling,
            deadline_s=self._request.deadline_s,
            router_id=self._around.router_id,
            priority=self._request.priority,
            tenant=self._request.tenant,
            siblings=dataclasses.replace(self._request.siblings, before=self._request.siblings.before + self.index),
            trace=None if self._request.trace is None else self._span.context,
        )

    async def _relay(self, placed: Placed) -> FinishReason:
        """Pass on what arrives until the worker's last word; whatever ends it earlier closes the attempt there."""
        try:
            with self._around.movement.watching(placed, self._request_now):
                while True:
                    arrival = await placed.stream.next()
                    reach(self._point(arrival))
                    self._take(arrival, placed)
                    if arrival.finish is not None:
                        return arrival.finish
        finally:
            self._around.placer.left(self.request_id)
            placed.link.forget(placed.stream)
            if not placed.stream.is_complete and not self._is_left_open:
                self._around.links.close_later(placed.link, placed.stream)

    def _point(self, arrival: Arrival) -> Point:
        if arrival.finish is not None:
            return Point.ROUTER_FINISHED
        return Point.ROUTER_TOKEN if self._emitted else Point.ROUTER_FIRST_TOKEN

    def _take(self, arrival: Arrival, placed: Placed) -> None:
        self._lifetime.merge(arrival.lifetime)
        if arrival.tokens:
            self._around.placer.first_token(self.request_id)
        is_first = not self._emitted and bool(arrival.tokens)
        self._account.arrived(len(arrival.tokens), arrival.cached_tokens, time.monotonic())
        if is_first:
            self._span.event("first token")
            self._log_first_token(placed)
        self._tell(arrival.tokens)

    def _tell(self, tokens: Sequence[SampledToken]) -> None:
        for sampled in tokens:
            self._report(TokenEvent(self.index, len(self._emitted), sampled))
            self._emitted.append(sampled)

    def _log_first_token(self, placed: Placed) -> None:
        compared = self._account.comparison
        if compared is None:  # another router had placed it
            return
        log.info(
            "first token request=%s worker=%s ttft_s=%.4f since_decision_s=%s predicted_s=%.4f reused_blocks=%d "
            "predicted_blocks=%d",
            self.request_id,
            placed.link.worker,
            self._lifetime.between(Instant.RECEIVED, Instant.FIRST_TOKEN) or 0.0,
            "unpredicted" if compared.actual_s is None else f"{compared.actual_s:.4f}",
            compared.predicted_s,
            compared.reused_blocks,
            compared.predicted_blocks,
        )

    def _settle(self, outcome: str) -> None:
        """All is known: hold it against what was predicted, and write it down."""
        compared, token_s = self._account.comparison, self._account.token_s
        if token_s is not None:
            self._around.placer.flowed(token_s)
        if compared is not None:
            self._around.metrics.compare(compared)
        self._around.request_log.put(functools.partial(self._account.record, outcome))
        self._end_span(outcome)
        instants = " ".join(f"{name}={at_s:.3f}" for name, at_s in self._lifetime.as_dict().items())
        log.info(
            "answer ended request=%s outcome=%s tokens=%d attempts=%d cached_tokens=%d %s",
            self.request_id,
            outcome,
            len(self._emitted),
            self._account.attempts,
            self.cached_tokens,
            instants,
        )

    def _end_span(self, outcome: str) -> None:
        self._span.set(
            choice=self.index,
            outcome=outcome,
            tokens=len(self._emitted),
            attempts=self._account.attempts,
            cached_tokens=self.cached_tokens,
            resumptions=self._request.resumptions,
        )
        self._span.end(error=None if outcome in _GOOD_ENDS else outcome)
