"""Puts one attempt at an answer onto a decode worker: look, choose, open; wait where nobody can take it now."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.admission.admission import Admission
from router.admission.admission_queue import WaitingRoom
from router.admission.metrics import AdmissionMetrics
from router.admission.queued_request import Released, Rules, Wanting, Workers
from router.fleet.fleet import Fleet
from router.fleet.link_pool import LinkPool
from router.fleet.token_stream import AnswerStream
from router.fleet.worker import Member
from router.fleet.worker_link import WorkerLink
from router.metrics import RouterMetrics
from router.routing.policies import RECONSIDERING, policy_named
from router.routing.policy import Decision
from router.routing.routing_state import RoutingState
from router.routing.selector import Ask, Selector, Shape
from router.serving.attempts import Attempts
from twostroke.config import Role, RouterConfig
from twostroke.errors import Draining, FingerprintMismatch, Overloaded, PeerLost, ServeError, StaleEpoch
from twostroke.fault_points import Point, reach
from twostroke.ids import RequestId, WorkerId
from twostroke.lifetime import Instant, Lifetime
from twostroke.request import Request
from twostroke.rpc.convert import request_to_message
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.tracing.span import OpenSpan, Value

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""A worker that could not be reached may be back without the fleet having noticed anything."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An attempt that a decode worker has accepted."""

    link: WorkerLink
    stream: AnswerStream
    decision: Decision | None
    """None: another router's."""
    decided_at_s: float
    """By the monotonic clock; from then on the decision's forecast counts."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    worker: WorkerId
    error: ServeError


class Placer:
    """Shared by all requests."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, routing: RoutingState, links: LinkPool, metrics: RouterMetrics
    ) -> None:
        self._policy_name = config.routing.policy
        self._selector = Selector(
            policy_named(config.routing.policy),
            routing.index,
            routing.reservations,
            seed=None if config.routing.seed is None else config.routing.seed + config.rank,
        )
        rules = Rules(
            reconsiders=config.routing.policy in RECONSIDERING,
            slo_ttft_s=config.routing.slo_ttft_s,
            most_held=config.routing.max_queued_requests,
        )
        admission = Admission(rules, self._selector, routing.reservations)
        self._room = WaitingRoom(admission, self._workers, AdmissionMetrics(metrics.registry))
        fleet.listen(self._room.notice)
        self._worker_wait_s = config.worker_wait_s
        self.attempts = Attempts()
        self._fleet = fleet
        self._reservations = routing.reservations
        self._links = links
        self._metrics = metrics

    async def run(self) -> None:
        """Let those that wait for their turn go, until cancelled."""
        await self._room.run()

    async def place(
        self,
        request: Request,
        lifetime: Lifetime,
        span: OpenSpan,
        *,
        has_had_turn: bool,
        at: WorkerId | None = None,
        avoided: WorkerId | None = None,
    ) -> Placed:
        """Returns once a worker has it; every worker asked counts as an attempt and gets its own number, not below the
        request's. One that has had its turn, and lost its worker, does not wait for another turn; nor is it refused, it
        waits for a worker. `at`: that one has its pages, and computes the rest, if it takes it. `avoided`: the last one
        to be asked.

        Raises Overloaded where every worker that could be asked is full or would be too late, Draining where all of
        them are leaving, PeerLost where none came in time, and what a worker says about the request itself. What was
        placed is to be told `first_token` and `left`.
        """
        wanting = self._wanting(request, has_had_turn)
        give_up_s = time.monotonic() + self._worker_wait_s
        full: set[WorkerId] = set()
        unusable: set[WorkerId] = set() if avoided is None else {avoided}
        while True:
            serving = [m for m in self._fleet.serving(Role.DECODE) if m.worker not in unusable]
            free = [m for m in serving if m.worker not in full]
            if serving and not free and not has_had_turn:
                raise Overloaded(f"all {len(serving)} decode workers that serve are full; try again later")
            if not free and self._fleet.is_leaving and not has_had_turn:
                raise Draining("every decode worker drains and takes no new requests; try again later")
            if not free:
                await self._wait(give_up_s)
                unusable.clear()
                full.clear()
                continue
            asked_s = time.monotonic()
            prepared = [m for m in free if m.worker == at]
            workers = dataclasses.replace(self._workers(prepared), prefill=()) if prepared else self._workers(free)
            released = await self._room.turn(wanting, workers)
            held_s = time.monotonic() - asked_s
            give_up_s += held_s  # who waits for a turn has workers
            if released is None:
                continue
            wanting = dataclasses.replace(wanting, is_urgent=True)
            if not self._workers().can_serve(released.decision):  # it was for those who wait for the turn's task
                self._room.left(request.request_id)
                continue
            attempt = dataclasses.replace(request, attempt=self.attempts.next(request.attempt))
            placed = await self._open(attempt, released, lifetime)
            if isinstance(placed, Placed):
                span.set(held_s=held_s, attempt=attempt.attempt, **described(self._policy_name, released.decision))
                return placed
            span.event("refused", worker=placed.worker, error=repr(placed.error))
            (full if isinstance(placed.error, Overloaded) else unusable).add(placed.worker)

    async def _wait(self, give_up_s: float) -> None:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise PeerLost(f"no decode worker could take the request within {self._worker_wait_s} s; try again later")
        await self._fleet.wait_for_change(min(left_s, LOOK_AGAIN_S))

    @contextlib.contextmanager
    def refuge(self, request: Request, others: Sequence[Member]) -> Iterator[Member]:
        """Where an open answer would best go on, by what these decode workers hold and have to do. Inside, its room
        there is taken."""
        ask = dataclasses.replace(self._ask(request), request_id=RequestId(f"{request.request_id} moves"))
        shape = self._workers().shape
        decision = self._selector.select(ask, shape, others, (), time.monotonic())
        try:
            yield self._member(decision.decode)
        finally:
            self._reservations.end(ask.request_id)

    def first_token(self, request_id: RequestId) -> None:
        self._room.first_token(request_id)

    def left(self, request_id: RequestId) -> None:
        """Its attempt is over."""
        self._room.left(request_id)

    def answered(self, tokens: int) -> None:
        """An answer has ended after so many: the next ones are expected to be like it."""
        self._selector.answered(tokens)

    def flowed(self, token_s: float) -> None:
        """An answer, whole or not, has come at one token in this time."""
        self._selector.flowed(token_s)

    async def _open(self, request: Request, released: Released, lifetime: Lifetime) -> Placed | _Refusal:
        decision = released.decision
        self._note(request, decision)
        reach(Point.ROUTER_PLACED)
        lifetime.mark(Instant.ROUTED)
        decode = self._member(decision.decode)
        link, stream = self._links.to(decode), AnswerStream(request.request_id, request.attempt, len(request.emitted))
        is_open, may_be_open, begun_s = False, True, time.monotonic()
        try:
            message = request_to_message(
                request,
                fingerprint=self._fleet.facts.fingerprint,
                worker_epoch=str(decode.epoch),
                source=None if decision.source is None else self._page_source(decision.source),
                peer=self._peer(decision),
            )
            await link.open(message, stream)
            is_open = True
        except ServeError as error:
            may_be_open = isinstance(error, PeerLost)
            log.warning(
                "open refused request=%s attempt=%d worker=%s error=%s: %s",
                request.request_id,
                request.attempt,
                decode.worker,
                type(error).__name__,
                error,
            )
            if may_go_elsewhere(error):
                return _Refusal(decode.worker, error)
            raise
        finally:
            if not is_open:
                self._room.left(request.request_id)
                link.forget(stream)
            if not is_open and may_be_open:
                self._links.close_later(link, stream)
        reach(Point.ROUTER_OPENED)
        lifetime.mark(Instant.OPENED)
        now_s = time.monotonic()
        self._reservations.opened(request.request_id, now_s)
        self._room.opened(now_s - begun_s)
        return Placed(link, stream, decision, released.decided_at_s)

    def _wanting(self, request: Request, has_had_turn: bool) -> Wanting:
        now_s = time.monotonic()
        return Wanting(
            ask=self._ask(request),
            priority=request.priority,
            tenant=request.tenant,
            arrived_s=now_s,
            deadline_s=None if request.deadline_s is None else now_s + request.deadline_s - time.time(),
            is_urgent=has_had_turn,
            siblings=request.siblings,
        )

    def _ask(self, request: Request) -> Ask:
        return Ask(
            request_id=request.request_id,
            known_tokens=len(request.prompt) + len(request.emitted),
            names=request.names,
            most_answer_tokens=request.sampling.max_tokens - len(request.emitted),
        )

    def _workers(self, decode: Sequence[Member] | None = None) -> Workers:
        """Those that serve, of decode workers only the given ones."""
        facts = self._fleet.facts
        return Workers(
            Shape(block_size=facts.block_size, page_bytes=facts.page_bytes),
            self._fleet.serving(Role.DECODE) if decode is None else decode,
            self._fleet.serving(Role.PREFILL),
        )

    def _note(self, request: Request, decision: Decision) -> None:
        self._metrics.count_decision(self._policy_name, "local" if decision.source is None else "prefill")
        log.info(
            "routed request=%s attempt=%d policy=%s decode=%s source=%s peer=%s cached_blocks=%d first_token_s=%.4f %s",
            request.request_id,
            request.attempt,
            self._policy_name,
            decision.decode,
            decision.source or "local",
            decision.peer or "none",
            decision.forecast.cached_blocks,
            decision.forecast.first_token_s,
            decision.why or "",
        )

    def _peer(self, decision: Decision) -> PeerPrefix | None:
        return None if decision.peer is None else PeerPrefix(self._page_source(decision.peer), decision.peer_blocks)

    def _page_source(self, worker: WorkerId) -> worker_pb2.PageSource:
        member = self._member(worker)
        return worker_pb2.PageSource(worker_id=member.worker, address=member.address, epoch=str(member.epoch))

    def _member(self, worker: WorkerId) -> Member:
        member = self._fleet.member(worker)
        assert member is not None, "seen to serve, without an await in between"
        return member


def described(policy: str, decision: Decision) -> dict[str, Value]:
    """A decision and all that led to it, as attributes of a span."""
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


def may_go_elsewhere(error: ServeError) -> bool:
    """It says something about the worker or the way to it, not about the request: another worker may take that."""
    return error.retryable or isinstance(error, StaleEpoch | FingerprintMismatch)
