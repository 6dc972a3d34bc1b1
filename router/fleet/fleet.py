"""Who is alive: the supervisor's view, checked against epochs and fingerprints, and every worker's event log.

The supervisor says which lives of which workers exist; each of them is followed (see `feed`) until the supervisor no
longer lists it. While the supervisor is away its last view stays in force, and broken event streams tell who is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import grpc.aio

from router.fleet.event_faults import Deliver, EventFaults, FaultRates, undisturbed
from router.fleet.failure_detector import LivenessMetrics, Vigil
from router.fleet.feed import EventSink, Feed, Ledger
from router.fleet.liveness import Change, Life
from router.fleet.metrics import FleetMetrics, ScalingMetrics, WorkerReading
from router.fleet.serving_facts import ServingFacts
from router.fleet.worker import Member, Standing
from router.metrics import ROLE, RouterMetrics
from twostroke.config import Role, RouterConfig
from twostroke.errors import PeerLost
from twostroke.fault_points import Point, reach
from twostroke.ids import Epoch, WorkerId
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import fleet_pb2
from twostroke.rpc.v1.control_pb2 import WORKER_STATE_DRAINING, WORKER_STATE_SERVING, WORKER_STATE_STARTING
from twostroke.rpc.v1.fleet_pb2_grpc import FleetStub

log = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.25
"""Between two attempts to reach the supervisor."""
VIEW_SILENCE_S = 6.0
"""Three times the supervisor's longest silence: then it is asked again, and until it answers its last view stands."""


class Fleet:
    """Owner of the members and of what is known from their events."""

    def __init__(
        self,
        config: RouterConfig,
        us: Membership,
        router_id: str,
        metrics: RouterMetrics,
        events: EventSink,
        on_gone: Callable[[Member, str], None],
        on_back: Callable[[Member], None],
    ) -> None:
        """`on_gone` is told of lives that are over, or thought to be; `on_back`, of those that were thought to be."""
        self._events = events
        self.fingerprint: str | None = None
        """Of the first worker that introduced itself; all others must agree."""
        self._config = config
        self._us = us
        self._router_id = router_id
        self._metrics = metrics
        self._on_gone, self._on_back = on_gone, on_back
        self.vigil = Vigil(config.patience, LivenessMetrics(metrics.registry, ROLE), self._judged)
        self._members: dict[WorkerId, Member] = {}
        self._latest: dict[WorkerId, Epoch] = {}
        """Also of workers that are gone: an earlier life must not come back as a new member."""
        self._followers: dict[WorkerId, asyncio.Task[None]] = {}
        self._awaits_decode = False
        """The supervisor lists a decode worker that is dead or starting: it will serve soon."""
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._facts: ServingFacts | None = None
        self._ledger = Ledger(
            events=events,
            metrics=metrics,
            vigil=self.vigil,
            introduced=self._accept,
            changed=self._note_change,
            heard=self._tell_listeners,
        )
        self._event_faults = FaultRates.parse(config.event_faults)
        FleetMetrics(metrics.registry, self._readings)
        self._scaling = ScalingMetrics(metrics.registry)

    async def run(self, address: str) -> None:
        """Watch and follow until cancelled. `address` is where other routers reach this one; empty: nowhere."""
        request = fleet_pb2.WatchRequest(watcher=self._router_id, address=address)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.vigil.run(), name="vigil")
            while True:
                await self._watch(request, tasks)
                await asyncio.sleep(RECONNECT_PAUSE_S)

    @property
    def facts(self) -> ServingFacts:
        if self._facts is None:
            raise PeerLost("no decode worker has introduced itself yet; try again when the fleet is up")
        return self._facts

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def serving(self, role: Role) -> list[Member]:
        return [m for m in self._members.values() if m.role is role and m.standing is Standing.SERVING]

    @property
    def can_answer(self) -> bool:
        """A decode worker serves, or is only suspect: requests wait for that one, and a balancer need not go away."""
        standings = {m.standing for m in self._members.values() if m.role is Role.DECODE}
        return bool(standings & {Standing.SERVING, Standing.SUSPECT})

    @property
    def is_leaving(self) -> bool:
        """No decode worker will take a request any more: those that could all drain, and no other one is coming."""
        standings = {m.standing for m in self._members.values() if m.role is Role.DECODE} - {Standing.REFUSED}
        return standings == {Standing.DRAINING} and not self._awaits_decode

    def member(self, worker: WorkerId) -> Member | None:
        return self._members.get(worker)

    def listen(self, listener: Callable[[], None]) -> None:
        """It is called whenever a worker reports, and when some member's standing changes."""
        self._listeners.append(listener)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until some member's standing changes, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _watch(self, request: fleet_pb2.WatchRequest, tasks: asyncio.TaskGroup) -> None:
        channel = PeerChannel(self._config.fleet_address, self._us)
        try:
            call = FleetStub(channel.channel).Watch(request, metadata=channel.metadata)
            async with listening(VIEW_SILENCE_S) as heard:
                while isinstance(view := await call.read(), fleet_pb2.FleetView):
                    heard()
                    reach(Point.ROUTER_VIEW)
                    self._take(view, tasks)
            log.warning("fleet watch ended address=%s", channel.address)
        except TimeoutError:
            log.warning("fleet watch silent address=%s seconds=%g", channel.address, VIEW_SILENCE_S)
        except grpc.aio.AioRpcError as error:
            log.warning("fleet watch broken address=%s error=%s", channel.address, error_of(error, channel.address))
        finally:
            await channel.close()

    def _take(self, view: fleet_pb2.FleetView, tasks: asyncio.TaskGroup) -> None:
        """Make the members what the supervisor says they are.

        A restarted supervisor lists workers as starting until it has found them: what is known of them stays in force.
        Of one that died it says DEAD before it says STARTING.
        """
        listed: set[WorkerId] = set()
        self._awaits_decode = False
        for said in view.members:
            worker, epoch = WorkerId(said.worker_id), _usable_epoch(said)
            self._awaits_decode |= said.returns and said.role == Role.DECODE
            if epoch is None:
                self._awaits_decode |= said.role == Role.DECODE
                if said.state == WORKER_STATE_STARTING:
                    listed.add(worker)
                continue
            if epoch < self._latest.get(worker, epoch):
                self._metrics.stale_epochs_refused_total.inc()
                log.warning("stale member refused worker=%s epoch=%s latest=%s", worker, epoch, self._latest[worker])
                continue
            listed.add(worker)
            known = self._members.get(worker)
            if known is not None and (known.epoch, known.address) == (epoch, said.address):
                known.state = said.state
                continue
            if known is not None:
                self._leave(known, f"life {epoch} has begun")
            self._join(Member(worker, Role(said.role), said.address, epoch, said.state), tasks)
        for member in self.members:
            if member.worker not in listed:
                self._leave(member, "the supervisor no longer lists it")
        self._events.follow_routers(view.routers, tasks)
        self._scaling.take(view.scaling)
        self._note_change()

    def _join(self, member: Member, tasks: asyncio.TaskGroup) -> None:
        log.info("member joins worker=%s epoch=%s address=%s", member.worker, member.epoch, member.address)
        self._latest[member.worker] = member.epoch
        self._members[member.worker] = member
        self.vigil.begin(member)
        feed = Feed(member, self._us, self._ledger, self._delivery(member))
        self._followers[member.worker] = tasks.create_task(feed.run(), name=f"feed {member.worker}")

    def _delivery(self, member: Member) -> Deliver:
        if self._event_faults is None:
            return undisturbed
        return EventFaults(self._event_faults, f"{member.worker} {member.epoch.incarnation}").deliver

    def _leave(self, member: Member, reason: str) -> None:
        log.info("member leaves worker=%s epoch=%s life=%s reason=%s", member.worker, member.epoch, member.life, reason)
        self.vigil.end(member)
        self._followers.pop(member.worker).cancel()
        del self._members[member.worker]
        self._events.forget(member.worker)
        self._restate_facts()
        self._on_gone(member, reason)

    def _judged(self, member: Member, change: Change) -> None:
        member.life = change.life
        if change.life is Life.DEAD:
            self._on_gone(member, f"{change.cause}: {change.signals}")
        elif change.before is Life.DEAD:
            self._on_back(member)
        self._note_change()

    def _note_change(self) -> None:
        """Wake whoever waits for the fleet to be another one."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def _accept(self, member: Member) -> None:
        """A worker has introduced itself: it fits, or it is refused for as long as it lives."""
        assert member.server is not None
        shown = member.server.fingerprint
        if self.fingerprint is None:
            self.fingerprint = shown
        if shown != self.fingerprint:
            member.refusal = f"fingerprint {shown} is not the fleet's {self.fingerprint}"
            log.error(
                "worker refused worker=%s epoch=%s fingerprint=%s fleet_fingerprint=%s: it does not serve the same KV; "
                "restart it with the fleet's model, or this router with the new fleet",
                member.worker,
                member.epoch,
                shown,
                self.fingerprint,
            )
        self._restate_facts()
        self._note_change()

    def _restate_facts(self) -> None:
        """As the decode workers say that are here; while there is none, the last ones' word stands."""
        usable = [m for m in self.members if m.role is Role.DECODE and m.refusal is None]
        models = [m.model for m in usable if m.model is not None]
        if not models:
            return
        assert self.fingerprint is not None, "taken from the first worker that introduced itself"
        model, pool_pages = models[0], min(model.pool_pages for model in models)
        self._facts = ServingFacts(
            ready=True,
            model=model.model,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            block_size=model.block_size,
            pool_tokens=pool_pages * model.block_size,
            pool_pages=pool_pages,
            page_bytes=model.page_bytes,
            dtype=model.dtype,
            fingerprint=self.fingerprint,
        )

    def _readings(self) -> Iterable[WorkerReading]:
        now_s = time.monotonic()
        for m in self.members:
            age_s = None if m.reported_at_s is None else now_s - m.reported_at_s
            yield WorkerReading(
                m.worker, m.role.value, m.standing.value, m.load, age_s, self._events.block_count(m.worker)
            )


def _usable_epoch(said: fleet_pb2.Member) -> Epoch | None:
    """The life that is meant, or None where there is nobody to talk to."""
    if said.role not in (Role.PREFILL, Role.DECODE) or not said.address:
        return None
    if said.state not in (WORKER_STATE_SERVING, WORKER_STATE_DRAINING):
        return None
    try:
        return Epoch.parse(said.epoch)
    except ValueError:
        log.error("member ignored worker=%s epoch=%r: not an epoch", said.worker_id, said.epoch)
        return None
