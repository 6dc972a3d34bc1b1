"""Follows one life of one worker: who it is, what it holds, how loaded it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from router.fleet.event_faults import Deliver, undisturbed
from router.fleet.failure_detector import Vigil
from router.fleet.liveness import Life, Signal
from router.fleet.worker import Member
from router.metrics import RouterMetrics
from twostroke.errors import InternalError, PeerLost, ServeError, StaleEpoch
from twostroke.fault_points import Point, reach
from twostroke.ids import Epoch, WorkerId
from twostroke.rpc.channel import PeerChannel, error_of, is_refusal
from twostroke.rpc.membership import Membership
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.v1.control_pb2 import KvEventBatch
from twostroke.rpc.v1.control_pb2_grpc import ControlStub
from twostroke.rpc.v1.fleet_pb2 import RouterMember

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""Of the calls by which a worker introduces itself; they compute nothing."""
RETRY_PAUSE_S = 0.2
"""Between two attempts to reach a worker."""
REPLAY_PAUSE_S = 0.02
"""Before events are asked for again: a worker whose log is broken must not keep the router busy."""


class EventSink(Protocol):
    """What takes the events of workers, and keeps what they say about blocks."""

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        """The batch that would follow; None where only a snapshot helps."""

    def apply(self, worker: WorkerId, epoch: Epoch, message: KvEventBatch) -> bool:
        """Returns False where the worker's log has to be asked for again."""

    def reported(self, worker: WorkerId, now_s: float) -> None:
        """A load report of the worker came in."""

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, and with it all of its blocks."""

    def block_count(self, worker: WorkerId) -> int:
        """Blocks that the worker holds, counted once per tier."""

    def follow_routers(self, listed: Iterable[RouterMember], tasks: asyncio.TaskGroup) -> None:
        """The supervisor lists these routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where news of workers is written down."""

    events: EventSink
    metrics: RouterMetrics
    vigil: Vigil
    introduced: Callable[[Member], None]
    """The member has said what it is; may refuse it."""
    changed: Callable[[], None]
    """The member's standing is another one."""
    heard: Callable[[], None]
    """It has reported its load."""


class Feed:
    """Writes to one member and, on its behalf, to the ledger."""

    def __init__(self, member: Member, us: Membership, ledger: Ledger, deliver: Deliver = undisturbed) -> None:
        self._member = member
        self._us = us
        self._ledger = ledger
        self._deliver = deliver

    async def run(self) -> None:
        """Until cancelled, or until the worker is refused."""
        while True:
            channel = PeerChannel(self._member.address, self._us)
            try:
                await self._introduce(channel)
                if self._member.refusal is not None:
                    return
                while True:
                    await self._follow(channel)
                    await asyncio.sleep(REPLAY_PAUSE_S)
            except grpc.aio.AioRpcError as error:
                self._broke(error_of(error, channel.address))
            except ServeError as error:
                self._broke(error)
            except TimeoutError:
                log.warning("events silent worker=%s epoch=%s", self._member.worker, self._member.epoch)
            except Exception as error:
                log.exception("feed failed worker=%s", self._member.worker)
                self._broke(InternalError(f"{type(error).__name__}: {error}"))
            finally:
                await channel.close()
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _introduce(self, channel: PeerChannel) -> None:
        control = ControlStub(channel.channel)
        server = await control.GetServerInfo(
            control_pb2.GetServerInfoRequest(), metadata=channel.metadata, timeout=CALL_TIMEOUT_S
        )
        if server.epoch != str(self._member.epoch):
            self._ledger.metrics.stale_epochs_refused_total.inc()
            raise StaleEpoch(f"{channel.address} is life {server.epoch}, expected {self._member.epoch}")
        model = await control.GetModelInfo(
            control_pb2.GetModelInfoRequest(), metadata=channel.metadata, timeout=CALL_TIMEOUT_S
        )
        self._member.server, self._member.model = server, model
        self._ledger.introduced(self._member)

    async def _follow(self, channel: PeerChannel) -> None:
        """Apply batches; returns where the log has to be asked for again. A stream that broke, or is silent, raises."""
        member = self._member
        following = self._ledger.events.next_sequence(member.worker, member.epoch)
        request = control_pb2.SubscribeKvEventsRequest()
        if following is not None:
            request = control_pb2.SubscribeKvEventsRequest(epoch=str(member.epoch), start_sequence=following)
        control, silence_s = ControlStub(channel.channel), self._ledger.vigil.patience.dead_after_s
        call = control.SubscribeKvEvents(request, metadata=channel.metadata)
        try:
            async with listening(silence_s) as heard:
                while isinstance(message := await call.read(), control_pb2.KvEventBatch):
                    heard()
                    if reach(Point.ROUTER_EVENTS):
                        continue
                    if not all(self._take(delivered) for delivered in self._deliver(message)):
                        return
                raise PeerLost(f"{channel.address} ended its event stream")
        finally:
            call.cancel()

    def _take(self, message: control_pb2.KvEventBatch) -> bool:
        """Write one batch down; False where the log does not follow on."""
        member, ledger = self._member, self._ledger
        if message.epoch != str(member.epoch):
            ledger.metrics.stale_epochs_refused_total.inc()
            raise StaleEpoch(f"events of {member.worker} are of life {message.epoch}, expected {member.epoch}")
        self._hear(message.load)
        return ledger.events.apply(member.worker, member.epoch, message)

    def _hear(self, load: control_pb2.Load) -> None:
        """Whatever it says about blocks, it is alive and this is its load."""
        member, now_s = self._member, time.monotonic()
        before = member.standing
        self._ledger.events.reported(member.worker, now_s)
        member.report(load, now_s)
        self._ledger.vigil.heard(member, Signal.EVENTS)
        if member.standing is not before:
            if load.state == control_pb2.WORKER_STATE_DEAD:
                self._ledger.metrics.engines_lost_total.inc()
            log.info("member is worker=%s epoch=%s standing=%s", member.worker, member.epoch, member.standing)
            self._ledger.changed()
        self._ledger.heard()

    def _broke(self, error: ServeError) -> None:
        member, vigil = self._member, self._ledger.vigil
        if member.life is Life.ALIVE or member.reported_at_s is None:
            log.warning(
                "events broken worker=%s epoch=%s error=%s: %s",
                member.worker,
                member.epoch,
                type(error).__name__,
                error,
            )
        vigil.broke(member)
        if isinstance(error, StaleEpoch):
            vigil.replaced(member)
        elif is_refusal(error):
            vigil.refused(member)
