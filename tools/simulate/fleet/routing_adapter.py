"""The decisions of a simulated router: index, reservations, admission, selector and policy of the live router.

The simulator moves requests, tokens and event batches through virtual time. What the live router's shells do around
these objects (`router.fleet.feed`, `router.serving.placement`, `router.admission.admission_queue`) is done here without
waiting: what is decided later is fetched by `due`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.admission import queued_request
from router.admission.admission import Admission
from router.admission.admission_queue import PAUSE_S
from router.admission.queued_request import QueuedRequest, Refused, Rules, Stranded, Verdict
from router.fleet.liveness import Liveness
from router.fleet.worker import Worker, WorkerStatus
from router.routing.policies import RECONSIDERING
from router.routing.policy import Policy
from router.routing.prefix_index import Applied, PrefixIndex
from router.routing.reservations import ReservationChanges, Reservations, ReservationWatch
from router.routing.selector import Selector, Shape, Workers
from tools.simulate.fleet.shape import FleetShape
from twostroke.config import Role
from twostroke.ids import BlockHash, Epoch, RequestId, RouterId, WorkerId
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.v1.control_pb2 import WORKER_STATE_SERVING, Load, ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer that wants to be placed, for the first time or again."""

    request_id: RequestId
    arrived_s: float
    known_tokens: int
    """Tokens of prompt and answer so far."""
    block_hashes: tuple[BlockHash, ...]
    """Hashes of the full blocks of prompt and answer."""
    most_answer_tokens: int
    tenant: str = ""
    priority: int = 0
    has_had_turn: bool = False
    """It was placed, on a worker that was lost."""
    without: frozenset[WorkerId] = frozenset()
    """Decode workers that have refused it already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlacement:
    request_id: RequestId
    decode: WorkerId
    source: WorkerId | None
    peer: WorkerId | None
    peer_blocks: int
    decided_s: float
    first_token_s: float
    """Predicted, from then on."""
    cached_blocks: int
    """Predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRefusal:
    request_id: RequestId
    retry_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCounts:
    reservations: int
    """Open now."""
    decisions: int
    decision_cpu_s: float
    gaps: int
    snapshots: int
    divergences: int
    false_refusals: int = 0
    """Refused ones that would have made it, as far as can be known."""


@dataclass(frozen=True, slots=True)
class RoutingAdapters:
    """Makes one for each router."""

    policy: str
    new_policy: Callable[[], Policy]
    holds: bool = False
    """Requests wait in the router for their turn; otherwise they go at once and wait at their workers, as in systems
    that know no admission."""

    def __call__(self, shape: FleetShape, router: int) -> RoutingAdapter:
        rules = Rules(queues=self.holds, reconsiders=self.policy in RECONSIDERING, slo_ttft_s=shape.slo_ttft_s)
        return RoutingAdapter(self.new_policy(), rules, shape, seed=shape.seed * 1000 + router)


@dataclass(frozen=True, slots=True)
class _ReservationUpdate:
    """From one router to another."""

    batch: ReservationChanges
    is_whole: bool
    """The first of a stream: nothing else is open."""


class RoutingAdapter:
    def __init__(self, policy: Policy, rules: Rules, shape: FleetShape, seed: int) -> None:
        self._index = PrefixIndex()
        self._reservations = Reservations()
        self._selector = Selector(policy, self._index, self._reservations, seed=seed)
        self._admission = Admission(rules, self._selector, self._reservations)
        self._shape = Shape(block_size=shape.block_size, page_bytes=shape.page_bytes)
        self._watches: dict[str, ReservationWatch] = {}
        """What other routers have been told."""
        self._known: dict[WorkerId, Worker] = {}
        self._asks: dict[RequestId, Ask] = {}
        """All requests that are open."""
        self._waiting: dict[RequestId, Ask] = {}
        """No decode worker serves."""
        self._noticed = False
        """Something has changed that may let held requests go."""
        self._looked_s = -PAUSE_S
        """When those were last looked at."""
        self._sent_s: dict[RequestId, float] = {}
        """When requests were given to a worker that has not confirmed them yet."""
        self._due: list[SimulatedPlacement | SimulatedRefusal] = []
        self._decisions = self._gaps = self._snapshots = self._divergences = 0
        self._decision_cpu_s = 0.0

    def joined(self, worker: WorkerId, role: Role, epoch: Epoch) -> None:
        """The supervisor lists this epoch of the worker."""
        known = Worker(worker, role, str(worker), epoch, WORKER_STATE_SERVING)
        known.model = ModelInfo()
        self._known[worker] = known

    def heard(self, worker: WorkerId, epoch: Epoch, batch: EventBatch, load: Load, now_s: float) -> bool:
        """One event batch. False where the log does not follow on: ask for it again from `next_sequence`."""
        known = self._known.get(worker)
        if known is None or known.epoch != epoch:
            return True
        self._reservations.reported(worker, now_s)
        known.report(load, now_s)
        was_serving, known.liveness = known.liveness is Liveness.ALIVE, Liveness.ALIVE
        verdict = self._index.apply(worker, epoch, batch)
        self._snapshots += verdict is Applied.APPLIED and batch.snapshot
        self._gaps += verdict is Applied.GAP
        self._divergences += verdict is Applied.DIVERGED
        self._noticed = True
        if not was_serving:
            self._look_again(now_s)
        return verdict in (Applied.APPLIED, Applied.OLD)

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        """None: only a snapshot helps."""
        return self._index.next_sequence(worker, epoch)

    def left(self, worker: WorkerId, now_s: float) -> None:
        """This epoch is over."""
        self._known.pop(worker, None)
        self._index.forget(worker)

    def place(self, ask: Ask, now_s: float) -> None:
        """Answered by `due`, now or later."""
        workers = self._workers()
        free = [worker for worker in workers.decode if worker.worker_id not in ask.without]
        if not workers.decode:
            self._waiting[ask.request_id] = ask
        elif not free:
            self._due.append(SimulatedRefusal(request_id=ask.request_id, retry_after_s=None))
        else:
            self._asks[ask.request_id] = ask
            begun_s = time.thread_time()
            verdict = self._admission.enter(_queued(ask), Workers(self._shape, free, workers.prefill), now_s)
            self._decision_cpu_s += time.thread_time() - begun_s
            self._decisions += 1
            if verdict is not None:
                self._take(verdict, now_s)

    def due(self, now_s: float) -> Sequence[SimulatedPlacement | SimulatedRefusal]:
        """What has been decided and not been fetched yet."""
        wake_s = self.wake_s()
        if wake_s is not None and wake_s <= now_s:
            begun_s = time.thread_time()
            verdicts = self._admission.wake(self._workers(), now_s)
            self._decision_cpu_s += time.thread_time() - begun_s
            self._noticed, self._looked_s = False, now_s
            for verdict in verdicts:
                self._take(verdict, now_s)
        due, self._due = self._due, []
        return due

    def wake_s(self) -> float | None:
        """When `due` is to be asked next even if nothing happens before."""
        if not self._admission.queued and not len(self._admission.false_rejections):
            return None
        earliest_s = self._looked_s + PAUSE_S
        if self._noticed:
            return earliest_s
        wake_at_s = self._admission.wake_at_s
        return None if wake_at_s is None else max(earliest_s, wake_at_s)

    def opened(self, request_id: RequestId, now_s: float) -> None:
        """The attempt is over; with its whole answer, unless it was lost or refused."""
        self._reservations.opened(request_id, now_s)
        if request_id in self._sent_s:
            self._admission.capacity.opened_in(now_s - self._sent_s.pop(request_id))

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        self._noticed |= self._admission.first_token(request_id, now_s)

    def ended(self, request_id: RequestId, answer_tokens: int | None, now_s: float) -> None:
        self._admission.leave(request_id, now_s)
        self._noticed = True
        for known in (self._waiting, self._asks, self._sent_s):
            known.pop(request_id, None)
        if answer_tokens is not None:
            self._selector.ended(answer_tokens)

    def reservation_update(self, router: str) -> object | None:
        """What another router has not been told yet of this one's reservations: meant for its adapter alone."""
        watch = self._watches.get(router)
        is_first = watch is None
        if watch is None:
            watch = self._watches[router] = self._reservations.watch(lambda: None)
        batch = self._reservations.take(watch)
        return _ReservationUpdate(batch, is_first) if batch or is_first else None

    def heard_router(self, router: str, reservation_update: object, now_s: float) -> None:
        """What the adapter of another router said by `reservation_update`."""
        assert isinstance(reservation_update, _ReservationUpdate)
        self._reservations.apply(RouterId(router), reservation_update.batch, now_s, whole=reservation_update.is_whole)

    def left_router(self, router: str, now_s: float) -> None:
        """It has died, and comes back with nothing."""
        self._reservations.lost(RouterId(router), now_s)
        watch = self._watches.pop(router, None)
        if watch is not None:
            self._reservations.unwatch(watch)

    def blocks(self, worker: WorkerId) -> EventBatch | None:
        """The worker's set as the index has it, as a snapshot; None where it is not known to be true."""
        return self._index.snapshot(worker)

    def counts(self) -> RoutingCounts:
        return RoutingCounts(
            reservations=len(self._reservations),
            decisions=self._decisions,
            decision_cpu_s=self._decision_cpu_s,
            gaps=self._gaps,
            snapshots=self._snapshots,
            divergences=self._divergences,
            false_refusals=self._admission.false_rejections.count,
        )

    def _serving(self, role: Role) -> list[Worker]:
        return [w for w in self._known.values() if w.role is role and w.status is WorkerStatus.SERVING]

    def _look_again(self, now_s: float) -> None:
        waiting, self._waiting = self._waiting, {}
        for ask in waiting.values():
            self.place(ask, now_s)

    def _workers(self) -> Workers:
        return Workers(self._shape, self._serving(Role.DECODE), self._serving(Role.PREFILL))

    def _take(self, verdict: Verdict, now_s: float) -> None:
        """Hand out what was decided."""
        request_id = verdict.request_id
        match verdict:
            case queued_request.Placement():
                self._sent_s[request_id] = now_s
                self._due.append(_placement(verdict))
            case Refused():
                self._due.append(SimulatedRefusal(request_id=request_id, retry_after_s=verdict.late_s))
            case Stranded():
                self._waiting[request_id] = self._asks[request_id]


def _queued(ask: Ask) -> QueuedRequest:
    return QueuedRequest(
        request_id=ask.request_id,
        known_tokens=ask.known_tokens,
        block_hashes=ask.block_hashes,
        most_output_tokens=ask.most_answer_tokens,
        priority=ask.priority,
        tenant=ask.tenant,
        arrived_s=ask.arrived_s,
        is_urgent=ask.has_had_turn or bool(ask.without),
    )


def _placement(placed: queued_request.Placement) -> SimulatedPlacement:
    decision = placed.decision
    return SimulatedPlacement(
        request_id=placed.request_id,
        decode=decision.decode,
        source=decision.source,
        peer=decision.peer,
        peer_blocks=decision.peer_blocks,
        decided_s=placed.decided_at_s,
        first_token_s=decision.forecast.first_token_s,
        cached_blocks=decision.forecast.cached_blocks,
    )
