"""Finds a decode worker for a request: repeats admission, routing and Open until one takes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence

from router.admission.admission import Admission
from router.admission.admission_queue import AdmissionQueue
from router.admission.queued_request import Placement, QueuedRequest, Rules, Siblings
from router.fleet.fleet import Fleet
from router.fleet.link_pool import LinkPool
from router.fleet.token_stream import TokenStream
from router.fleet.worker import Worker, WorkerStatus
from router.metrics import RouterMetrics
from router.routing.policies import NARROWING, RECONSIDERING, policy_named
from router.routing.policy import Candidate, Decision
from router.routing.routing_state import RoutingState
from router.routing.selector import Selector, Workers
from router.serving.parent_request import Attempts, ParentRequest, changed
from router.serving.request_stats import RequestStats
from twostroke.base.errors import Draining, FingerprintMismatch, Overloaded, PeerLost, ServeError, StaleEpoch
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import RequestId, WorkerId
from twostroke.base.lifetime import Instant
from twostroke.config import Role, RouterConfig
from twostroke.request import Attempt
from twostroke.rpc.convert import attempt_to_message
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.tracing.span import OpenSpan, Value

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""Seconds after which workers are tried again: one may be back although the fleet has not noticed a change."""


class Placer:
    """Places the requests of a router. All requests share it, its selector and its admission queue."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, routing: RoutingState, links: LinkPool, metrics: RouterMetrics
    ) -> None:
        settings = config.routing
        self.policy = settings.policy
        self._reservations = routing.reservations
        seed = None if settings.seed is None else settings.seed + config.number
        self.selector = Selector(
            policy_named(settings.policy),
            routing.index,
            routing.reservations,
            seed=seed,
            narrows=settings.policy in NARROWING,
        )
        rules = Rules(
            reconsiders=settings.policy in RECONSIDERING,
            slo_ttft_s=settings.slo_ttft_s,
            most_queued=settings.max_queued_requests,
        )
        admission = Admission(rules, self.selector, routing.reservations)
        self.queue = AdmissionQueue(admission, self._workers, metrics)
        fleet.on_report(self.queue.notice)
        self._worker_wait_s = config.worker_wait_s
        self.attempts = Attempts()
        self._fleet = fleet
        self._links = links
        self._metrics = metrics

    async def place(
        self,
        attempt: Attempt,
        parent: ParentRequest,
        stats: RequestStats,
        span: OpenSpan,
        *,
        is_urgent: bool,
        at: WorkerId | None = None,
        avoided: WorkerId | None = None,
    ) -> TokenStream:
        """Returns the request's token stream once a worker has taken it.

        Every Open is an attempt with a number of its own, not below that of `attempt`. `is_urgent`: the request was
        admitted before and has lost its worker, so it is neither queued nor refused, and waits for a worker. `at` is a
        worker that has its pages, and is tried first; `avoided` is tried last. A request with a token goes only to
        workers with its parent's weights.

        Raises Overloaded if all workers are full or would be too late, Draining if all of them drain, PeerLost if none
        took it in time, WeightsChanged if no worker has its weights any more, and a worker's own refusal. After
        placing, call `first_token` and `left` of the queue for it.
        """
        is_urgent |= not self._are_routed(parent)
        queued = _queued(attempt, parent, is_urgent=is_urgent)
        give_up_s = time.monotonic() + self._worker_wait_s
        full: set[WorkerId] = set()
        unusable: set[WorkerId] = set() if avoided is None else {avoided}
        while True:
            serving = [w for w in self.takers(parent) if w.worker_id not in unusable]
            free = [w for w in serving if w.worker_id not in full]
            if not free:
                self._refuse_if_changed(parent)
                if not is_urgent:
                    self._refuse_if_hopeless(len(serving))
                await self._wait(give_up_s)
                unusable.clear()
                full.clear()
                continue
            prepared = [w for w in free if w.worker_id == at]
            workers = dataclasses.replace(self._workers(prepared), prefill=()) if prepared else self._workers(free)
            asked_s = time.monotonic()
            placement = await self.queue.admit(queued, workers)
            queued_s = time.monotonic() - asked_s
            give_up_s += queued_s  # time in the queue is no time without a worker
            if placement is None:
                continue
            workers = self._workers(self.takers(parent))  # one may have left after the decision
            if not workers.can_serve(placement.decision):
                queued = dataclasses.replace(queued, is_urgent=True)
                self.queue.left(attempt.request_id)
                continue
            numbered = dataclasses.replace(attempt, number=self.attempts.next(attempt.number))
            opened = await self._open(numbered, placement, workers, stats)
            if isinstance(opened, TokenStream):
                span.set(queued_s=queued_s, attempt=numbered.number)
                explain(span, self.policy, placement.decision)
                return opened
            queued, worker = dataclasses.replace(queued, is_urgent=True), placement.decision.decode
            span.event("refused", worker=worker, error=opened.label())
            (full if isinstance(opened, Overloaded) else unusable).add(worker)

    @contextlib.contextmanager
    def migration_target(self, attempt: Attempt, parent: ParentRequest, others: Sequence[Worker]) -> Iterator[Worker]:
        """Yields the worker at which an open request would best continue. Its load there is reserved meanwhile."""
        moving = dataclasses.replace(attempt, request_id=RequestId(f"{attempt.request_id} moves"))
        queued = _queued(moving, parent)
        workers = dataclasses.replace(self._workers(others), prefill=())
        decision = self.selector.select(queued, workers, time.monotonic())
        try:
            yield workers.by_id[decision.decode]
        finally:
            self._reservations.end(queued.request_id)

    def takers(self, parent: ParentRequest) -> list[Worker]:
        """Returns the decode workers that may take a request. Once it has a token, these are those with its weights."""
        weights, own = parent.weights, parent.request.own_weights
        if not weights.are_fixed:
            return self._fleet.serving(Role.DECODE)
        taking = self._fleet.taking_begun(Role.DECODE)
        return [worker for worker in taking if weights.admit(worker.fingerprint, own)]

    def _are_routed(self, parent: ParentRequest) -> bool:
        """Returns whether the workers that get new requests may compute this one. True while none is known."""
        routed = self._fleet.fingerprint
        weights = parent.weights
        return not weights.are_fixed or routed is None or weights.admit(routed, parent.request.own_weights)

    def _refuse_if_changed(self, parent: ParentRequest) -> None:
        """Raises WeightsChanged if no worker has the weights of a request, or may soon have them."""
        if self._are_routed(parent):
            return
        for worker in self._fleet.decode_workers():
            if worker.status is WorkerStatus.JOINING:
                return
            is_suspect = worker.status is WorkerStatus.SUSPECT
            admits = parent.weights.admit(worker.fingerprint, parent.request.own_weights)
            if (is_suspect or worker.takes_begun) and admits:
                return
        raise changed(parent.request_id)

    def _refuse_if_hopeless(self, serving: int) -> None:
        if serving:
            raise Overloaded(f"all {serving} decode workers that serve are full; try again later")
        if self._fleet.is_leaving:
            raise Draining("every decode worker drains and takes no new requests; try again later")

    async def _wait(self, give_up_s: float) -> None:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise PeerLost(f"no decode worker could take the request within {self._worker_wait_s} s; try again later")
        await self._fleet.wait_for_change(min(left_s, LOOK_AGAIN_S))

    async def _open(
        self, attempt: Attempt, placement: Placement, workers: Workers, stats: RequestStats
    ) -> TokenStream | ServeError:
        """Opens the attempt at its worker. Returns the error if another worker may take it, and raises other errors."""
        decision = placement.decision
        self._note(attempt, decision)
        reach(Point.ROUTER_PLACED)
        stats.lifetime.mark(Instant.ROUTED)
        decode = workers.by_id[decision.decode]
        link = self._links.to(decode)
        stream = TokenStream(link, attempt.request_id, attempt.number, len(attempt.emitted))
        peer = None
        if decision.peer is not None:
            source = workers.by_id[decision.peer].page_source
            peer = PeerPrefix(source, decision.peer_blocks, decision.forecast.peer_load_s)
        is_open, may_be_open, begun_s = False, True, time.monotonic()
        try:
            message = attempt_to_message(
                attempt,
                fingerprint=decode.fingerprint,
                worker_epoch=str(decode.epoch),
                source=None if decision.source is None else workers.by_id[decision.source].page_source,
                peer=peer,
                source_forecast=source_forecast(decision),
            )
            await link.open(message, stream)
            is_open = True
        except ServeError as error:
            may_be_open = isinstance(error, PeerLost)
            log.warning(
                "open refused request=%s attempt=%d worker=%s error=%s",
                attempt.request_id,
                attempt.number,
                decode.worker_id,
                error.label(),
            )
            if may_go_elsewhere(error):
                return error
            raise
        finally:
            if not is_open:
                self.queue.left(attempt.request_id)
                link.forget(stream)
            if not is_open and may_be_open:
                self._links.close_later(stream)
        reach(Point.ROUTER_OPENED)
        stats.lifetime.mark(Instant.OPENED)
        stats.placed(decision, placement.decided_at_s)
        now_s = time.monotonic()
        self._reservations.opened(attempt.request_id, now_s)
        self.queue.opened(now_s - begun_s)
        return stream

    def _workers(self, decode: Sequence[Worker] | None = None) -> Workers:
        """Returns the workers to choose from. The given decode workers have equal weights; None: those that serve."""
        prefill = self._fleet.serving(Role.PREFILL)
        if decode and decode[0].fingerprint != self._fleet.fingerprint:
            taking = self._fleet.taking_begun(Role.PREFILL)
            prefill = [worker for worker in taking if worker.fingerprint == decode[0].fingerprint]
        return Workers(self._fleet.facts, self._fleet.serving(Role.DECODE) if decode is None else decode, prefill)

    def _note(self, attempt: Attempt, decision: Decision) -> None:
        self._metrics.count_decision(self.policy, "local" if decision.source is None else "prefill")
        log.info(
            "routed request=%s attempt=%d policy=%s decode=%s source=%s peer=%s cached_blocks=%d first_token_s=%.4f %s",
            attempt.request_id,
            attempt.number,
            self.policy,
            decision.decode,
            decision.source or "local",
            decision.peer or "none",
            decision.forecast.cached_blocks,
            decision.forecast.first_token_s,
            decision.why or "",
        )


def source_forecast(decision: Decision) -> worker_pb2.SourceForecast | None:
    """Returns the forecast of when the page source will have the blocks. None: no source, or no forecast."""
    forecast = decision.forecast
    if decision.source is None or not forecast.cached_blocks + forecast.computed_tokens:
        return None
    return worker_pb2.SourceForecast(
        cached_blocks=forecast.cached_blocks,
        fetch_s=forecast.fetch_s,
        wait_s=max(forecast.queue_s, forecast.fetch_s),
        compute_s=forecast.prefill_s,
    )


def _queued(attempt: Attempt, parent: ParentRequest, *, is_urgent: bool = False) -> QueuedRequest:
    now_s, deadline_s, siblings = time.monotonic(), attempt.request.deadline_s, parent.siblings
    return QueuedRequest(
        attempt=attempt,
        routing=parent.routing,
        arrived_s=now_s,
        deadline_s=None if deadline_s is None else now_s + deadline_s - time.time(),
        siblings=Siblings(siblings.before + attempt.request.sampling.choice, siblings.count),
        is_urgent=is_urgent,
    )


def explain(span: OpenSpan, policy: str, decision: Decision) -> None:
    """Adds the decision and its alternatives to the span, for readers of the trace."""
    span.explain(functools.partial(described, policy, decision))
    for other in decision.others:
        span.late_event("candidate", functools.partial(priced, other))


def described(policy: str, decision: Decision) -> dict[str, Value]:
    """Returns a decision, its forecast and its price, as attributes of a span."""
    parts = {f"forecast.{name}": value for name, value in dataclasses.asdict(decision.forecast).items()}
    if decision.why is not None:
        parts |= {f"price.{name}": value for name, value in dataclasses.asdict(decision.why).items()}
    return {
        "policy": policy,
        "decode": decision.decode,
        "source": decision.source or "local",
        "peer": decision.peer or "none",
        "peer_blocks": decision.peer_blocks,
        "first_token_s": decision.forecast.first_token_s,
        **parts,
    }


def priced(candidate: Candidate) -> dict[str, Value]:
    """Returns a candidate that was not taken, with the terms of its price, as attributes of an event."""
    why = candidate.why
    return {
        "decode": candidate.decode,
        "source": candidate.source or "local",
        "peer": candidate.peer or "none",
        "wait_s": why.wait_s,
        "prefill_s": why.prefill_s,
        "transfer_s": why.transfer_s,
        "tail_s": why.tail_s,
        "harm_s": why.harm_s,
        "damage_s": why.damage_s,
    }


def may_go_elsewhere(error: ServeError) -> bool:
    """Returns whether another worker may take the request: the error is about the worker or the connection to it."""
    return error.retryable or isinstance(error, StaleEpoch | FingerprintMismatch)
