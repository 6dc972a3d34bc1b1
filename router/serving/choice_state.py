"""One choice of a request, from its first placement to its last token, over as many decode workers as it takes.

Everything that must survive a decode worker is here: the prompt, the tokens so far, the hashes of their blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from router.fleet.demand import DemandReporter
from router.fleet.fleet import Fleet
from router.fleet.link_pool import LinkPool
from router.fleet.token_stream import TokenDelta, TokenStream
from router.metrics import RouterMetrics
from router.serving.migration import Migrated, Migration
from router.serving.parent_request import ParentRequest, first_attempt, until
from router.serving.placement import Placer, may_go_elsewhere
from router.serving.recovery import Recovered
from router.serving.request_log import NoLog, RequestLog
from router.serving.request_stats import RequestStats
from twostroke.base.errors import (
    Cancelled,
    EngineLost,
    InternalError,
    InvalidRequest,
    NotFound,
    ServeError,
    StepFailed,
)
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import BlockHash, RequestId, WorkerId
from twostroke.base.lifetime import Instant
from twostroke.kv_cache.block import extend_hashes
from twostroke.observability.bug_log import log_bug
from twostroke.request import Attempt, FinishReason, SampledToken
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import OpenSpan

log = logging.getLogger(__name__)

MOST_FAILED_STEPS = 2
"""Failed steps after which a request ends: what two workers could not compute would fail at a third one, too."""
MOST_LOST_ENGINES = 3
"""Engines lost without a new token after which a request ends. If it breaks engines, it must not reach all workers. Few
others run beside it each time."""
MAX_LOSSES = 5
"""Attempts that may fail in a row without a new token. After one more, the request itself is the likely cause."""

_GOOD_ENDS = frozenset({*FinishReason, "cancelled"}) - {FinishReason.ERROR}
"""Outcomes that are not errors. "cancelled": a stop string was found, or the client has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What all requests of a router share."""

    router_id: str
    tasks: asyncio.TaskGroup
    fleet: Fleet
    placer: Placer
    links: LinkPool
    migration: Migration
    metrics: RouterMetrics
    request_log: RequestLog | NoLog
    demand: DemandReporter
    recorder: Recorder


@dataclass(slots=True)
class _Losses:
    """Counts failed attempts by cause, and decides when the request itself is to blame."""

    in_a_row: int = 0
    """Attempts that failed one after the other without a new token between them."""
    failed_steps: int = 0
    """Those of them that ended with a failed step."""
    lost_engines: int = 0
    """Those of them that ended with the loss of the worker's engine."""

    def add(self, error: ServeError, *, has_new_tokens: bool) -> None:
        """Counts a failed attempt. Raises an error if the request must not go to another worker."""
        if has_new_tokens:
            self.in_a_row = self.failed_steps = self.lost_engines = 0
        self.in_a_row += 1
        if not may_go_elsewhere(error):
            raise error
        if self.in_a_row > MAX_LOSSES:
            raise InternalError(f"{self.in_a_row} workers were lost in a row: {error.message}") from error
        if isinstance(error, EngineLost):
            self.lost_engines += 1
            if self.lost_engines == MOST_LOST_ENGINES:
                raise InternalError(f"{self.lost_engines} workers lost their engines: {error.message}") from error
        if isinstance(error, StepFailed):
            self.failed_steps += 1
            if self.failed_steps == MOST_FAILED_STEPS:
                raise InternalError(f"{self.failed_steps} attempts failed alike: {error.message}") from error


class ChoiceReports(Protocol):
    """Takes the tokens, ends and errors of a request's choices."""

    def tokens(self, choice: int, delta: TokenDelta) -> None:
        """Takes tokens of a choice that continues."""

    def put(self, event: tuple[int, TokenDelta] | ServeError) -> None:
        """Takes the end of a choice, or an error."""


class ChoiceState:
    def __init__(
        self,
        parent: ParentRequest,
        choice: int,
        block_hashes: tuple[BlockHash, ...],
        dependencies: Dependencies,
        reports: ChoiceReports,
        recovered: Recovered | None = None,
    ) -> None:
        """`recovered` is what a decode worker already has of the choice, if a client resumes its stream."""
        self.choice = choice
        self.request_id = RequestId(f"{parent.request_id}#{choice}")
        self._parent = parent
        self._request = parent.request.of_choice(choice)
        self._block_hashes = list(block_hashes)
        self._with = dependencies
        self._reports = reports
        self._recovered = recovered
        self._least_attempt = first_attempt(parent.resumptions)
        self._is_left_open = False
        self._has_ended = False
        self._begun_at: TokenStream | None = None
        """Stream of the attempt that has brought the latest token."""
        self._emitted: list[SampledToken] = []
        self._block_size = dependencies.fleet.facts.block_size
        self._stats = RequestStats(
            request_id=self.request_id,
            parent=parent,
            block_hashes=block_hashes,
            block_size=self._block_size,
            policy=dependencies.placer.policy,
        )
        if recovered is None:  # otherwise another router has counted it
            dependencies.demand.begins()
        self._span = dependencies.recorder.begin("answer", parent.request_id, parent.trace)
        self._wait: OpenSpan | None = None
        """Span from the latest placement to the first token."""

    def leave_open(self) -> None:
        """Keeps the choice open at its decode worker when its task is cancelled, so that a router can resume it."""
        self._is_left_open = True

    @property
    def has_begun(self) -> bool:
        return bool(self._emitted)

    def end(self, reason: FinishReason) -> None:
        """Reports the end of the choice, after its last token or because the caller needs no more."""
        self._has_ended = True
        self._with.placer.selector.ended(len(self._emitted))
        self._with.demand.ends(len(self._request.prompt), self._stats.cached_tokens, len(self._emitted))
        self._reports.put((self.choice, TokenDelta(len(self._emitted), (), reason, self._stats.cached_tokens)))

    async def run(self) -> None:
        """Reports tokens, and then one end or one error. Without either, it was cancelled."""
        outcome = "cancelled"
        try:
            had_passed = "the request's deadline had passed before it could be placed"
            async with until(self._request.deadline_s, had_passed, self._deadline_passed):
                reason = await self._over_attempts()
            outcome = reason.value
            self.end(reason)
        except ServeError as error:
            outcome = type(error).__name__
            self._reports.put(error)
        except Exception as error:
            log_bug(log, "request failed by a bug request=%s", self.request_id, error=error)
            outcome = "InternalError"
            self._reports.put(InternalError(f"internal error: {type(error).__name__}: {error}"))
        finally:
            self._stats.lifetime.mark(Instant.DONE)
            self._record(outcome)

    def _deadline_passed(self) -> str:
        return f"the request's deadline passed after {len(self._emitted)} tokens of choice {self.choice}"

    async def _over_attempts(self) -> FinishReason:
        stream: TokenStream | None = None
        if self._recovered is not None and not self._fits(self._recovered):
            self._recovered = None
        if self._recovered is not None:
            self._replay(self._recovered)
            if self._recovered.finish not in (None, FinishReason.ERROR):
                return self._recovered.finish
            stream = await self._reattach(self._recovered)
        losses = _Losses()
        next_worker: WorkerId | None = None
        avoided: WorkerId | None = None
        while len(self._emitted) < self._request.sampling.max_tokens:
            before = len(self._emitted)
            if stream is None:
                stream = await self._place(next_worker, avoided)
            worker, next_worker, avoided = stream.link.worker_id, None, None
            try:
                return await self._relay(stream)
            except Migrated as migrated:
                next_worker = migrated.to
                self._span.event("migrated", worker=worker, to=migrated.to or "any")
            except ServeError as error:
                losses.add(error, has_new_tokens=len(self._emitted) > before)
                avoided = worker if isinstance(error, StepFailed) else None
                self._with.metrics.reopened_requests_total.inc()
                self._span.event("reopened", lost_worker=worker, error=error.label())
                log.warning(
                    "reopening request=%s after_tokens=%d lost_worker=%s error=%s",
                    self.request_id,
                    len(self._emitted),
                    worker,
                    error.label(),
                )
            stream = None
        return FinishReason.LENGTH

    async def _place(self, at: WorkerId | None, avoided: WorkerId | None) -> TokenStream:
        is_urgent = self._stats.attempts > 0 or self._recovered is not None
        with self._span.part("route") as span:
            stream = await self._with.placer.place(
                self._attempt_now(),
                self._parent,
                self._stats,
                span,
                is_urgent=is_urgent,
                at=at,
                avoided=avoided,
            )
        self._wait = self._span.begin("wait")
        return stream

    def _fits(self, recovered: Recovered) -> bool:
        """Returns whether the recovered attempt has the request's weights. Its tokens fix these, if none has before."""
        weights = self._parent.weights
        decides = weights.fix if recovered.tokens else weights.admit
        return decides(recovered.link.fingerprint, self._request.own_weights)

    def _replay(self, recovered: Recovered) -> None:
        """Reports the recovered tokens, which another router has reported before."""
        sampling = dataclasses.replace(self._request.sampling, max_tokens=recovered.most_tokens)
        self._request = dataclasses.replace(self._request, sampling=sampling)
        self._least_attempt = max(self._least_attempt, recovered.attempt + 1)
        self._stats.arrived(0, recovered.cached_tokens, time.monotonic())
        if recovered.tokens:
            self._emitted += recovered.tokens
            scores, cached = recovered.prompt_logprobs, recovered.cached_tokens
            delta = TokenDelta(0, recovered.tokens, cached_tokens=cached, prompt_logprobs=scores, is_recovered=True)
            self._reports.tokens(self.choice, delta)

    async def _reattach(self, recovered: Recovered) -> TokenStream | None:
        """Attaches to the recovered attempt at its worker. Returns None if the choice has to be placed again."""
        if recovered.finish is not None:
            return None
        link, attempt = recovered.link, self._with.placer.attempts.next(self._least_attempt)
        stream, is_taken = TokenStream(link, self.request_id, attempt, len(self._emitted)), False
        try:
            await link.reattach(stream, recovered.attempt, self._request.deadline_s)
            is_taken = True
            self._span.event("recovered", worker=link.worker_id, tokens=len(self._emitted))
            self._stats.placed(None, time.monotonic())
            return stream
        except ServeError as error:
            is_another_attempt = isinstance(error, NotFound | InvalidRequest | Cancelled)  # it is over, or a later one
            if not may_go_elsewhere(error) and not is_another_attempt:
                raise
            log.warning("not recovered request=%s worker=%s error=%s", self.request_id, link.worker_id, error.label())
            return None
        finally:
            if not is_taken:
                link.forget(stream)
                self._with.links.close_later(stream)

    def _attempt_now(self) -> Attempt:
        """Returns an attempt with all tokens so far. Its final number is set when it is placed."""
        request = self._request
        known = (*request.prompt, *(sampled.token for sampled in self._emitted))
        extend_hashes(self._block_hashes, known, self._block_size, request.salt, request.public_blocks)
        return Attempt(
            request=request,
            request_id=self.request_id,
            number=self._least_attempt,
            emitted=tuple(self._emitted),
            block_hashes=tuple(self._block_hashes),
            router_id=self._with.router_id,
            trace=None if self._parent.trace is None else self._span.context,
        )

    async def _relay(self, stream: TokenStream) -> FinishReason:
        """Reports what arrives until the worker ends the attempt. If this ends earlier, the attempt is closed there."""
        try:
            with self._with.migration.watching(stream, self._attempt_now, self._parent):
                return await stream.read(functools.partial(self._take, stream))
        finally:
            self._with.placer.queue.left(self.request_id)
            stream.link.forget(stream)
            if not stream.is_complete and not self._is_left_open:
                self._with.links.close_later(stream)

    def _take(self, stream: TokenStream, delta: TokenDelta) -> None:
        if self._has_ended:
            return  # `end` was called, and the task is not cancelled yet
        if delta.finish is not None:
            reach(Point.ROUTER_FINISHED)
        else:
            reach(Point.ROUTER_TOKEN if self._emitted else Point.ROUTER_FIRST_TOKEN)
        if delta.lifetime:
            self._stats.lifetime.merge(delta.lifetime)
        if delta.proposals:
            self._stats.proposals = delta.proposals
        self._stats.arrived(len(delta.tokens), delta.cached_tokens, time.monotonic())
        if not delta.tokens:
            return  # `end` reports the end, with the cached tokens of all attempts
        if stream is not self._begun_at:
            self._begin(stream)
        self._emitted += delta.tokens  # before the report, which may end the choice
        self._reports.tokens(self.choice, delta if delta.finish is None else delta._replace(finish=None))

    def _begin(self, stream: TokenStream) -> None:
        """Notes the first token of an attempt. Raises Migrated if the request has tokens of other weights."""
        if not self._parent.weights.fix(stream.link.fingerprint, self._request.own_weights):
            raise Migrated(f"decode worker {stream.link.worker_id} has other weights than the request began with")
        self._begun_at = stream
        self._with.placer.queue.first_token(self.request_id)
        if self._emitted:
            return
        self._span.event("first token")
        if self._wait is not None:
            self._wait.end()

    def _record(self, outcome: str) -> None:
        """Records the outcome in metrics, the request log, the span and the log."""
        stats, compared = self._stats, self._stats.comparison
        if stats.token_s is not None:
            self._with.placer.selector.streamed(stats.token_s)
        if compared is not None:
            self._with.metrics.compare(compared)
        self._with.request_log.put(functools.partial(stats.record, outcome))
        self._span.set(
            choice=self.choice,
            outcome=outcome,
            tokens=len(self._emitted),
            attempts=stats.attempts,
            cached_tokens=stats.cached_tokens,
            resumptions=self._parent.resumptions,
        )
        self._span.end(error=None if outcome in _GOOD_ENDS else outcome)
        log.info(
            "choice ended request=%s outcome=%s worker=%s prompt_tokens=%d tokens=%d attempts=%d cached_tokens=%d "
            "predicted_tokens=%s ttft_s=%s predicted_s=%s %s",
            self.request_id,
            outcome,
            stats.worker_id,
            len(self._request.prompt),
            len(self._emitted),
            stats.attempts,
            stats.cached_tokens,
            None if compared is None else compared.predicted_blocks * self._block_size,
            None if compared is None or compared.actual_s is None else f"{compared.actual_s:.4f}",
            None if compared is None else f"{compared.predicted_s:.4f}",
            " ".join([f"{name}={at_s:.3f}" for name, at_s in stats.lifetime.as_dict().items()]),
        )
