"""A simulated router: takes requests in, gives them to decode workers, and follows every worker.

What the live router does over rpc (`router.serving`) takes a delay here. `simulated_routing` makes all decisions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.admission.queued_request import Placement, QueuedRequest
from router.routing.policy import Decision
from router.routing.reservations import ReservationChanges
from router.routing.selector import RoutingParams
from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.results import EventUse, RequestOutcome, Status
from tools.simulate.fleet.routing.feed import SimulatedFeed
from tools.simulate.fleet.routing.simulated_routing import SimulatedRouting
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.worker.decode_service import SimulatedDecodeService
from tools.simulate.fleet.worker.host import SimulatedHost
from tools.simulate.fleet.worker.steps import TOKEN
from tools.simulate.fleet.worker.tokens import HeardTokens
from tools.simulate.fleet.worker.worker_lifecycle import WorkerLifecycle
from twostroke.base.errors import Overloaded
from twostroke.base.ids import WorkerId
from twostroke.kv_cache.block import hash_block, root_hash
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.v1.control_pb2 import Load

COALESCE_S = 0.002
"""Least seconds between two messages of reservations to other routers."""


@dataclass(frozen=True, slots=True)
class RouterDependencies:
    """What all routers share."""

    queue: EventQueue
    shape: FleetShape
    workers: WorkerLifecycle
    events: EventUse
    over: Callable[[RequestOutcome], None]


class SimulatedRouter:
    def __init__(self, number: int, routing: SimulatedRouting, dependencies: RouterDependencies) -> None:
        self.name = f"router-{number}"
        self.routing = routing
        self.others: list[SimulatedRouter] = []
        self._dependencies = dependencies
        self._queue = dependencies.queue
        self._shape = dependencies.shape
        self._draws = random.Random(f"{dependencies.shape.seed} {self.name} events")
        self._feeds: dict[WorkerId, SimulatedFeed] = {}
        self._open: dict[SimulatedRequest, frozenset[WorkerId]] = {}
        """With the workers that have refused each."""
        self._by_id: dict[str, SimulatedRequest] = {}
        self._wake_s: float | None = None
        self._is_telling = False

    # Workers

    def join(self, host: SimulatedHost) -> None:
        """Called when the supervisor lists this epoch of a worker."""
        routing, worker, epoch = self.routing, host.worker, host.epoch
        self._close_feed(worker)
        routing.joined(worker, host.role, epoch)

        def hear(batch: EventBatch, load: Load) -> bool:
            self._dependencies.events.batches += 1
            follows_on = routing.heard(worker, epoch, batch, load, self._queue.now_s)
            self._drain()
            return follows_on

        if (service := host.decode_service) is not None:
            service.stream(self.name, lambda heard: self._hear_tokens(service, heard))
        self._feeds[worker] = SimulatedFeed(host, hear, partial(routing.next_sequence, worker, epoch), self._draws)

    def leave(self, host: SimulatedHost) -> None:
        """This epoch of a worker is over; one that has begun since is not."""
        if self._dependencies.workers.host(host.worker) is not host:
            return
        self._close_feed(host.worker)
        self.routing.left(host.worker, self._queue.now_s)
        self._drain()

    def lost(self, request: SimulatedRequest, attempt: int) -> None:
        """Places the request again, from the last token that was sent: that attempt's decode worker has died."""
        if request in self._open and request.attempts == attempt:
            request.was_lost = request.was_lost or request.first_token_s is None
            self._again(request)

    # Requests

    def take(self, request: SimulatedRequest) -> None:
        self._open[request] = frozenset()
        self._by_id[request.request_id] = request
        self._place(request)

    def restart(self, routing: SimulatedRouting) -> list[SimulatedRequest]:
        """Forgets everything; returns the requests that were open. Their clients have to ask again."""
        lost = list(self._open)
        for request in lost:
            if request.placement is not None:
                self._dependencies.workers.decode_service(request.placement.decision.decode).close(request)
            request.forget_answer(self._shape.block_size)
        self._open.clear()
        self._by_id.clear()
        self.routing = routing
        self._wake_s = None
        for feed in self._feeds.values():
            feed.close()
        for service in self._dependencies.workers.decode_services:
            service.end_stream(self.name)
        for host in self._dependencies.workers.listed:
            self.join(host)
        for other in self.others:
            other.routing.left_router(self.name, self._queue.now_s)
        return lost

    def _hear_tokens(self, service: SimulatedDecodeService, heard: HeardTokens) -> None:
        """Tokens take a while to get here."""
        request = self._by_id.get(heard.request_id)
        if request is None or heard.attempt != request.attempts:
            return
        token_s = self._shape.delays.token_s
        if request.heard_attempt != heard.attempt:
            request.heard_first(heard.cached_tokens, self._shape.block_size)
            self._queue.after(token_s, lambda: self._first_token(request))
        if heard.finish is not None:
            service.answered(request.request_id)
            self._queue.after(token_s, lambda: self._end(request, Status.DONE))

    # What other routers say

    def hear_router(self, name: str, changes: ReservationChanges, is_whole: bool) -> None:
        self.routing.heard_router(name, changes, is_whole, self._queue.now_s)

    # Below: placing

    def _place(self, request: SimulatedRequest) -> None:
        self._name_blocks(request)
        without = self._open[request]
        queued = QueuedRequest(
            attempt=request.attempt(self.name),
            routing=RoutingParams(priority=request.priority, tenant=request.tenant),
            arrived_s=request.arrived_s,
            is_urgent=request.placement is not None or bool(without),
        )
        self.routing.place(queued, without, self._queue.now_s)
        self._drain()

    def _drain(self) -> None:
        """Does what the routing has decided."""
        routing, now_s = self.routing, self._queue.now_s
        for decided in routing.due(now_s):
            request = self._by_id[decided.request_id]
            if isinstance(decided, Placement):
                self._send(request, decided)
            else:
                self._end(request, Status.REFUSED, decided.late_s or None)
        wake_s = routing.wake_s()
        if wake_s is not None and (self._wake_s is None or wake_s < self._wake_s):
            self._wake_s = wake_s
            self._queue.at(wake_s, self._woken)
        self._tell()

    def _woken(self) -> None:
        self._wake_s = None
        self._drain()

    def _send(self, request: SimulatedRequest, placement: Placement) -> None:
        request.placement = placement
        request.attempts += 1
        self._later(request, self._shape.delays.open_s, lambda: self._reach(request, placement.decision))

    def _later(self, request: SimulatedRequest, delay_s: float, action: Callable[[], None]) -> None:
        """Acts after a delay, if this attempt of the request is still the latest then."""
        attempt = request.attempts

        def act() -> None:
            if request in self._open and request.attempts == attempt:
                action()

        self._queue.after(delay_s, act)

    def _reach(self, request: SimulatedRequest, decision: Decision) -> None:
        workers, delays = self._dependencies.workers, self._shape.delays
        if workers.host(decision.decode).is_dead:
            self._later(request, delays.detection_s, lambda: self._again(request))
            return
        source = workers.host(decision.source).page_source() if decision.source is not None else None
        peer = workers.host(decision.peer).page_source() if decision.peer is not None else None
        try:
            workers.decode_service(decision.decode).open(request, self.name, source, peer)
        except Overloaded:
            self._later(request, delays.open_s, lambda: self._elsewhere(request, decision.decode))
            return
        self._later(request, delays.open_s, lambda: self._opened(request))

    def _opened(self, request: SimulatedRequest) -> None:
        self.routing.opened(request.request_id, self._queue.now_s)
        self._tell()

    def _elsewhere(self, request: SimulatedRequest, full: WorkerId) -> None:
        self._open[request] |= {full}
        self._again(request)

    def _again(self, request: SimulatedRequest) -> None:
        self.routing.ended(request.request_id, None, self._queue.now_s)
        self._place(request)

    def _first_token(self, request: SimulatedRequest) -> None:
        if request in self._open:
            self.routing.first_token(request.request_id, self._queue.now_s)
            self._drain()

    def _end(self, request: SimulatedRequest, status: Status, retry_after_s: float | None = None) -> None:
        if request not in self._open:
            return
        del self._open[request]
        del self._by_id[request.request_id]
        answer_tokens = request.emitted if status is Status.DONE else None
        self.routing.ended(request.request_id, answer_tokens, self._queue.now_s)
        token_s = self._shape.delays.token_s
        self._dependencies.over(request.outcome(status, token_s, self._queue.now_s, retry_after_s))
        self._drain()

    def _name_blocks(self, request: SimulatedRequest) -> None:
        """Blocks that the answer has filled since get their hashes."""
        hashes, size = request.block_hashes, self._shape.block_size
        while (len(hashes) + 1) * size <= request.known_tokens:
            hashes.append(hash_block(hashes[-1] if hashes else root_hash(), [TOKEN] * size))

    def _close_feed(self, worker: WorkerId) -> None:
        feed = self._feeds.pop(worker, None)
        if feed is not None:
            feed.close()

    # Below: telling other routers

    def _tell(self) -> None:
        if self.others and not self._is_telling:
            self._is_telling = True
            self._queue.after(COALESCE_S, self._tell_now)

    def _tell_now(self) -> None:
        self._is_telling = False
        for other in self.others:
            update = self.routing.reservation_update(other.name)
            if update is not None:
                self._queue.after(self._shape.delays.reservation_s, partial(other.hear_router, self.name, *update))
