"""The decisions of a simulated router: index, reservations, admission, selector and policy of the live router.

The simulator moves requests, tokens and event batches through virtual time. What the live router's shells do around
these objects (`router.fleet.feed`, `router.serving.placement`, `router.admission.admission_queue`) is done here without
waiting: what is decided later is fetched by `due`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.admission.admission import Admission
from router.admission.admission_queue import PAUSE_S
from router.admission.queued_request import Placement, QueuedRequest, Reason, Refused, Rules, Stranded, Verdict
from router.fleet.worker import Liveness, Shape, Worker, WorkerStatus
from router.routing.policies import NARROWING, RECONSIDERING
from router.routing.policy import Policy
from router.routing.prefix_index import Applied, PrefixIndex
from router.routing.reservations import ReservationChanges, Reservations, ReservationWatch
from router.routing.selector import Selector, Workers
from tools.simulate.fleet.results import EventUse
from tools.simulate.fleet.shape import FleetShape
from twostroke.base.ids import Epoch, RequestId, RouterId, WorkerId
from twostroke.config import Role
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.v1.control_pb2 import WORKER_STATE_SERVING, Load, ModelInfo


@dataclass(frozen=True, slots=True)
class _Unplaced:
    """A request that wants to be placed, for the first time or again."""

    request: QueuedRequest
    without: frozenset[WorkerId]
    """Decode workers that have refused it already."""


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """How the routers of a fleet decide."""

    policy: str
    new_policy: Callable[[], Policy]
    holds: bool = False
    """Whether requests wait in the router for their turn; otherwise they go at once and wait at their workers."""

    def __call__(self, shape: FleetShape, router: int, events: EventUse) -> SimulatedRouting:
        return SimulatedRouting(self, shape, router, events)


class SimulatedRouting:
    def __init__(self, setup: RoutingSetup, shape: FleetShape, router: int, events: EventUse) -> None:
        rules = Rules(queues=setup.holds, reconsiders=setup.policy in RECONSIDERING, slo_ttft_s=shape.slo_ttft_s)
        narrows, seed = setup.policy in NARROWING, shape.seed * 1000 + router
        self._index = PrefixIndex()
        self._reservations = Reservations()
        self._selector = Selector(setup.new_policy(), self._index, self._reservations, seed=seed, narrows=narrows)
        self._admission = Admission(rules, self._selector, self._reservations)
        self._fleet_shape = shape
        self._shape = Shape(block_size=shape.block_size, page_bytes=shape.page_bytes)
        self._watches: dict[str, ReservationWatch] = {}
        """What other routers have been told."""
        self._known: dict[WorkerId, Worker] = {}
        self._serving: Workers | None = None
        """Workers that serve. None: it has to be found out again."""
        self._asks: dict[RequestId, _Unplaced] = {}
        """All requests that are open."""
        self._waiting: dict[RequestId, _Unplaced] = {}
        """No decode worker serves."""
        self._noticed = False
        """Whether something has changed that may let held requests go."""
        self._looked_s = -PAUSE_S
        """When those were last looked at."""
        self._sent_s: dict[RequestId, float] = {}
        """When requests were given to a worker that has not confirmed them yet."""
        self._due: list[Placement | Refused] = []
        self._events = events
        self.decisions = 0
        self.decision_cpu_s = 0.0

    @property
    def reservations(self) -> int:
        """How many are open now."""
        return len(self._reservations)

    def joined(self, worker: WorkerId, role: Role, epoch: Epoch) -> None:
        """Called when the supervisor lists this epoch of the worker."""
        known = Worker(worker, role, str(worker), epoch, WORKER_STATE_SERVING)
        known.model = ModelInfo(page_bytes=self._fleet_shape.of_role(role).page_bytes)
        known.kv_form = self._fleet_shape.kv_form(role)
        self._known[worker] = known
        self._serving = None

    def heard(self, worker: WorkerId, epoch: Epoch, batch: EventBatch, load: Load, now_s: float) -> bool:
        """Takes an event batch. Returns False where it does not follow on: `next_sequence` says what to ask for."""
        known = self._known.get(worker)
        if known is None or known.epoch != epoch:
            return True
        self._reservations.reported(worker, now_s)
        was, was_serving = known.load.state, known.liveness is Liveness.ALIVE
        known.report(load, now_s)
        known.liveness = Liveness.ALIVE
        if load.state != was or not was_serving:
            self._serving = None
        verdict = self._index.apply(worker, epoch, batch)
        self._index.sweep()
        self._events.snapshots += verdict is Applied.APPLIED and batch.snapshot
        self._events.gaps += verdict is Applied.GAP
        self._events.divergences += verdict is Applied.DIVERGED
        self._noticed = True
        if not was_serving:
            self._look_again(now_s)
        return verdict in (Applied.APPLIED, Applied.OLD)

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        """Returns the next batch to ask for. None: only a snapshot helps."""
        return self._index.next_sequence(worker, epoch)

    def left(self, worker: WorkerId, now_s: float) -> None:
        """This epoch is over."""
        self._known.pop(worker, None)
        self._serving = None
        self._index.forget(worker)

    def place(self, request: QueuedRequest, without: frozenset[WorkerId], now_s: float) -> None:
        """Places a request on a decode worker that is not in `without`; `due` has the answer, now or later."""
        workers, request_id = self._workers(), request.request_id
        may_take = workers
        if without:
            others = [worker for worker in workers.decode if worker.worker_id not in without]
            may_take = Workers(self._shape, others, workers.prefill)
        if not workers.decode:
            self._waiting[request_id] = _Unplaced(request, without)
        elif not may_take.decode:
            self._due.append(Refused(request_id, Reason.QUEUE_FULL))
        else:
            self._asks[request_id] = _Unplaced(request, without)
            begun_s = time.thread_time()
            verdict = self._admission.enter(request, may_take, now_s)
            self.decision_cpu_s += time.thread_time() - begun_s
            self.decisions += 1
            if verdict is not None:
                self._take(verdict, now_s)

    def due(self, now_s: float) -> Sequence[Placement | Refused]:
        """Returns what has been decided and not been fetched yet."""
        wake_s = self.wake_s()
        if wake_s is not None and wake_s <= now_s:
            begun_s = time.thread_time()
            verdicts = self._admission.wake(self._workers(), now_s)
            self.decision_cpu_s += time.thread_time() - begun_s
            self._noticed, self._looked_s = False, now_s
            for verdict in verdicts:
                self._take(verdict, now_s)
        due, self._due = self._due, []
        return due

    def wake_s(self) -> float | None:
        """Returns when `due` is to be asked next even if nothing happens before."""
        if not self._admission.queued and not len(self._admission.false_rejections):
            return None
        earliest_s = self._looked_s + PAUSE_S
        if self._noticed:
            return earliest_s
        wake_at_s = self._admission.wake_at_s
        return None if wake_at_s is None else max(earliest_s, wake_at_s)

    def opened(self, request_id: RequestId, now_s: float) -> None:
        self._reservations.opened(request_id, now_s)
        if request_id in self._sent_s:
            self._admission.capacity.opened_in(now_s - self._sent_s.pop(request_id))

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        self._noticed |= self._admission.first_token(request_id, now_s)

    def ended(self, request_id: RequestId, answer_tokens: int | None, now_s: float) -> None:
        """Notes that the attempt is over, with its whole answer unless it was lost or refused."""
        self._admission.leave(request_id, now_s)
        self._noticed = True
        for known in (self._waiting, self._asks, self._sent_s):
            known.pop(request_id, None)
        if answer_tokens is not None:
            self._selector.ended(answer_tokens)

    def reservation_update(self, router: str) -> tuple[ReservationChanges, bool] | None:
        """Returns what another router has not been told yet of this one's reservations, and whether these are all."""
        watch = self._watches.get(router)
        is_whole = watch is None
        if watch is None:
            watch = self._watches[router] = self._reservations.watch(lambda: None)
        changes = self._reservations.take(watch)
        return (changes, is_whole) if changes or is_whole else None

    def heard_router(self, router: str, changes: ReservationChanges, is_whole: bool, now_s: float) -> None:
        """Takes what the routing of another router returned from `reservation_update`."""
        self._reservations.apply(RouterId(router), changes, now_s, whole=is_whole)

    def left_router(self, router: str, now_s: float) -> None:
        """Notes that another router has died. It comes back with nothing."""
        self._reservations.lost(RouterId(router), now_s)
        watch = self._watches.pop(router, None)
        if watch is not None:
            self._reservations.unwatch(watch)

    def blocks(self, worker: WorkerId) -> EventBatch | None:
        """Returns the worker's set as the index has it, as a snapshot; None where it is not known to be true."""
        return self._index.snapshot(worker)

    def _look_again(self, now_s: float) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            self.place(each.request, each.without, now_s)

    def _workers(self) -> Workers:
        if self._serving is None:
            serving = [worker for worker in self._known.values() if worker.status is WorkerStatus.SERVING]
            decode, prefill = ([w for w in serving if w.role is role] for role in (Role.DECODE, Role.PREFILL))
            self._serving = Workers(self._shape, decode, prefill)
        return self._serving

    def _take(self, verdict: Verdict, now_s: float) -> None:
        """Hands out what was decided."""
        request_id = verdict.request_id
        match verdict:
            case Placement():
                self._sent_s[request_id] = now_s
                self._due.append(verdict)
            case Refused():
                self._due.append(verdict)
            case Stranded():
                self._waiting[request_id] = self._asks[request_id]
