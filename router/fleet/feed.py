"""Follows the event stream of one epoch of one worker: its facts, its blocks, its load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from router.fleet.liveness import FailureDetector, Signal
from router.fleet.worker import Liveness, Worker
from router.metrics import RouterMetrics
from twostroke.base.errors import InternalError, PeerLost, ServeError, StaleEpoch
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import Epoch, WorkerId
from twostroke.rpc.channel import PeerChannel, error_of, is_refusal
from twostroke.rpc.convert import form_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub
from twostroke.rpc.v1.fleet_pb2 import RouterEntry

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""Deadline, in seconds, of the calls for the facts of a worker. They compute nothing."""
RETRY_PAUSE_S = 0.2
"""Seconds between two attempts to reach a worker."""
REPLAY_PAUSE_S = 0.02
"""Seconds before events are requested again: a worker with a broken log must not keep the router busy."""


class EventSink(Protocol):
    """Takes the events of workers, and keeps which blocks they hold."""

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        """Returns the number of the batch that has to follow. None: only a snapshot helps."""

    def apply(self, worker: WorkerId, epoch: Epoch, message: control_pb2.KvEventBatch) -> bool:
        """Applies a batch. Returns False if events have to be requested again."""

    def reported(self, worker: WorkerId, now_s: float) -> None:
        """Called when a load report of the worker has arrived."""

    def forget(self, worker: WorkerId) -> None:
        """Forgets a worker that is gone, and all of its blocks."""

    def block_count(self, worker: WorkerId) -> int:
        """Returns the number of the worker's blocks, counted once for each tier."""

    def follow_routers(self, listed: Iterable[RouterEntry], tasks: asyncio.TaskGroup) -> None:
        """Follows the reservations of the routers that the supervisor lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedDependencies:
    """What all feeds of a router share."""

    membership: Membership
    events: EventSink
    metrics: RouterMetrics
    detector: FailureDetector
    on_introduced: Callable[[Worker], None]
    """Called when the facts of the worker are known. It may refuse the worker."""
    on_status_change: Callable[[], None]
    on_load_report: Callable[[], None]


class Feed:
    def __init__(self, worker: Worker, dependencies: FeedDependencies) -> None:
        self._worker = worker
        self._with = dependencies

    async def run(self) -> None:
        """Follows the worker until it is refused or this is cancelled."""
        worker = self._worker
        while True:
            channel = PeerChannel(worker.address, self._with.membership)
            try:
                await self._introduce(channel)
                if worker.refusal is not None:
                    return
                while True:
                    await self._follow(channel)
                    await asyncio.sleep(REPLAY_PAUSE_S)
            except grpc.aio.AioRpcError as error:
                self._broke(error_of(error, channel.address))
            except ServeError as error:
                self._broke(error)
            except TimeoutError:
                log.warning("events silent worker=%s epoch=%s", worker.worker_id, worker.epoch)
            except Exception as error:
                log.exception("feed failed worker=%s", worker.worker_id)
                self._broke(InternalError(f"{type(error).__name__}: {error}"))
            finally:
                await channel.close()
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _introduce(self, channel: PeerChannel) -> None:
        control = ControlStub(channel.channel)
        server = await channel.call(control.GetServerInfo, control_pb2.GetServerInfoRequest(), CALL_TIMEOUT_S)
        if server.epoch != str(self._worker.epoch):
            self._with.metrics.stale_epochs_refused_total.inc()
            raise StaleEpoch(f"{channel.address} is epoch {server.epoch}, expected {self._worker.epoch}")
        model = await channel.call(control.GetModelInfo, control_pb2.GetModelInfoRequest(), CALL_TIMEOUT_S)
        self._worker.server, self._worker.model, self._worker.kv_form = server, model, form_of(model)
        self._with.on_introduced(self._worker)

    async def _follow(self, channel: PeerChannel) -> None:
        """Applies batches. Returns when events have to be requested again. Raises if the stream breaks or is silent."""
        worker = self._worker
        following = self._with.events.next_sequence(worker.worker_id, worker.epoch)
        request = control_pb2.SubscribeKvEventsRequest()
        if following is not None:
            request = control_pb2.SubscribeKvEventsRequest(epoch=str(worker.epoch), start_sequence=following)
        control, silence_s = ControlStub(channel.channel), self._with.detector.patience.dead_after_s
        call = control.SubscribeKvEvents(request, metadata=channel.metadata)
        try:
            async with listening(silence_s) as heard:
                while isinstance(message := await call.read(), control_pb2.KvEventBatch):
                    heard()
                    if reach(Point.ROUTER_EVENTS):
                        continue
                    if not self._take(message):
                        return
                raise PeerLost(f"{channel.address} ended its event stream")
        finally:
            call.cancel()

    def _take(self, message: control_pb2.KvEventBatch) -> bool:
        """Applies one batch. Returns False if events have to be requested again."""
        worker = self._worker
        if message.epoch != str(worker.epoch):
            self._with.metrics.stale_epochs_refused_total.inc()
            raise StaleEpoch(f"events of {worker.worker_id} are of epoch {message.epoch}, expected {worker.epoch}")
        self._hear(message.load)
        return self._with.events.apply(worker.worker_id, worker.epoch, message)

    def _hear(self, load: control_pb2.Load) -> None:
        """Takes a load report. The worker is alive, even if its batch cannot be applied."""
        worker, now_s = self._worker, time.monotonic()
        before = worker.status
        self._with.events.reported(worker.worker_id, now_s)
        worker.report(load, now_s)
        self._with.detector.heard(worker, Signal.EVENTS)
        if worker.status is not before:
            if load.state == control_pb2.WORKER_STATE_DEAD:
                self._with.metrics.engines_lost_total.inc()
            log.info("worker status worker=%s epoch=%s status=%s", worker.worker_id, worker.epoch, worker.status)
            self._with.on_status_change()
        self._with.on_load_report()

    def _broke(self, error: ServeError) -> None:
        worker, detector = self._worker, self._with.detector
        if worker.liveness is Liveness.ALIVE or worker.reported_at_s is None:
            name = type(error).__name__
            log.warning("events broken worker=%s epoch=%s error=%s: %s", worker.worker_id, worker.epoch, name, error)
        detector.broke(worker)
        if isinstance(error, StaleEpoch):
            detector.replaced(worker)
        elif is_refusal(error):
            detector.refused(worker)
