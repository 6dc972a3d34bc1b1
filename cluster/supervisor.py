"""Keeps the fleet alive: observe -> plan -> act, and tell every watcher at once what is so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from cluster.actors import Place, Serving
from cluster.drains import Drains
from cluster.endings import Ending
from cluster.fleet_service import FleetService
from cluster.ground import Ground, RayGround, WorkerDied, WorkerHandle
from cluster.node_watch import NodeWatch
from cluster.plan import Create, Observed, Resident, Stage, backoff_s, plan
from cluster.scaling.pilot import Pilot
from cluster.scaling.staff import Staff
from cluster.spec import NODE_ADDRESS, FleetSpec
from cluster.view import Snapshot, Worker
from twostroke.config import Role, WorkerConfig
from twostroke.errors import ConfigError, InternalError, NotFound, PeerLost, ServeError
from twostroke.fault_points import Point, reach
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc
from twostroke.telemetry import configure_logging

log = logging.getLogger(__name__)

PLACED_S = 10.0
"""A worker that has no process by then is told of: nothing else tells that Ray waits for room."""
SHUTDOWN_S = 5.0
"""A worker that has not shut down by then is killed."""
PING_S = 5.0
"""Between two questions to a worker whether it still answers."""
FROZEN_S = 30.0
"""Without an answer: its process is killed. Long after routers go around it: a cache is worth more than a few seconds,
and what freezes a process (a debugger, a stalled disk, a machine that is moved) often passes."""

RETURNED = InternalError("run() returned although nobody asked the worker to shut down")


class Supervisor:
    """Plain class; `SupervisorActor` is the actor."""

    def __init__(
        self, spec: FleetSpec, ground: Ground | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._us = Membership.of(spec.token, spec.tls)
        worker_count = sum(bounds.most for bounds in spec.bounds)
        self._ground = ground or RayGround(worker_count=worker_count, roles=spec.roles)
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._handles: dict[str, WorkerHandle] = {}
        self._drains = Drains(self, self._ground, self._us, SHUTDOWN_S)
        self._staff = Staff(self, self._ground, self._drains, spec)
        self._pilot = Pilot(self._staff, spec, clock)
        self._service = FleetService(self.drain, self._pilot.report)
        self._nodes = NodeWatch(self._ground, self.residents, self._drains)
        self._lives: asyncio.TaskGroup | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._listening = asyncio.Event()
        self._address = ""
        self._life: asyncio.Task[None] | None = None
        for config in self._staff.configs():
            self.add(config)

    async def run(self) -> None:
        """Serve Fleet and keep the workers alive until `stop`. Called again, it joins the run that is under way."""
        await asyncio.shield(self.begin())

    def begin(self) -> asyncio.Task[None]:
        """`run`, in the background."""
        if self._life is None:
            self._life = asyncio.create_task(self._run())
        return self._life

    async def address(self) -> str:
        """Of the Fleet service, once it listens."""
        await self._listening.wait()
        return self._address

    async def spec(self) -> FleetSpec:
        """As it was started with; for a launcher that takes over."""
        return self._spec

    async def snapshot(self, after_version: int = -1, timeout_s: float = 1.0) -> Snapshot:
        """The fleet now, or as soon as it is newer than `after_version`."""
        if self._version <= after_version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return Snapshot(self._version, tuple(self._workers.values()))

    async def drain(self, worker_id: str, deadline_s: float, restart: bool, force: bool = False) -> int:
        """Let a worker leave; how much was cut off, once it has left or serves again (see `Drains`).

        The last worker of its role leaves for good only with `force`; else this raises InvalidRequest.
        """
        if not (restart or force):
            self._staff.check_may_leave(worker_id)
        return await self._drains.drain(worker_id, deadline_s, restart, self._tasks())

    async def assign_role(self, worker_id: str, role: str) -> None:
        """Let a worker become the other role; returns when it serves as that."""
        self._tasks()
        await self._staff.assign(worker_id, Role(role))

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, automatic: bool = False
    ) -> dict[str, Any]:
        """As many workers from now on, or (`automatic`) as many as the planner wants. What `scaling` says."""
        self._tasks()
        self._pilot.order(prefill, decode, is_automatic=automatic)
        return await self.scaling()

    async def scaling(self) -> dict[str, Any]:
        """A `Standing`, as plain values."""
        return dataclasses.asdict(self._pilot.standing(self.residents()))

    def _tasks(self) -> asyncio.TaskGroup:
        """For what somebody wants of the fleet. Raises PeerLost where it cannot be had."""
        if self._lives is None:
            raise PeerLost("the supervisor is starting; try again")
        if self._stopping.is_set():  # what is written down now would outlive the fleet
            raise PeerLost("the fleet is being stopped")
        return self._lives

    # What drains and staff need

    def add(self, config: WorkerConfig) -> None:
        self._workers[config.worker_id] = Worker(config, Observed(config.worker_id))
        self.wake()

    def forget(self, worker_id: str) -> None:
        """It has left for good."""
        del self._workers[worker_id]
        handle = self._handles.pop(worker_id, None)
        if handle is not None:
            handle.remove()
        self.publish()

    def publish(self) -> None:
        """Watchers and launchers are told what is so now."""
        self._version += 1
        workers = [worker for worker in self._workers.values() if worker.observed.stage is not Stage.DRAINED]
        members = [worker.to_member() for worker in workers]
        view = fleet_pb2.FleetView(version=self._version, members=members, scaling=self._staff.to_message())
        self._service.publish(view)
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def role(self, worker_id: str) -> Role:
        return self._workers[worker_id].role

    def shall_switch(self, worker_id: str) -> bool:
        return self._staff.shall_switch(worker_id)

    def stage(self, worker_id: str) -> Stage:
        if worker_id not in self._workers:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(self._workers)}")
        return self._workers[worker_id].observed.stage

    def enter(self, worker_id: str, stage: Stage) -> None:
        self._change(worker_id, stage)

    async def until(self, worker_id: str, is_so: Callable[[Stage], bool]) -> None:
        while not is_so(self.stage(worker_id)):
            await self._changed.wait()

    def serving(self, worker_id: str) -> Serving:
        serving = self._workers[worker_id].serving
        assert serving is not None, "only what serves is drained"
        return serving

    def heirs(self, worker_id: str) -> Sequence[control_pb2.Heir]:
        role = self._workers[worker_id].role
        return [
            control_pb2.Heir(worker_id=other, address=worker.serving.address, epoch=worker.serving.epoch)
            for other, worker in self._workers.items()
            if other != worker_id
            and worker.role is role
            and worker.observed.stage is Stage.SERVING
            and worker.serving is not None
            and not (worker.place and self._nodes.leaves(worker.place.node_id))
        ]

    def handle(self, worker_id: str) -> WorkerHandle:
        if worker_id not in self._handles:
            raise NotFound(f"{worker_id} has no process")
        return self._handles[worker_id]

    def residents(self) -> list[Resident]:
        return [
            Resident(worker_id, worker.role, worker.observed.stage, worker.place.node_id if worker.place else None)
            for worker_id, worker in self._workers.items()
        ]

    async def stop(self) -> tuple[Ending, ...]:
        """Shut every worker down and remove it; `run` returns. How each of them ended."""
        self._stopping.set()
        endings = await asyncio.gather(*(_remove(worker_id, handle) for worker_id, handle in self._handles.items()))
        self._handles.clear()
        self._ground.forget()
        return tuple(endings)

    async def _run(self) -> None:
        server = self._server()
        fleet_pb2_grpc.add_FleetServicer_to_server(self._service, server.server)
        server.offer("twostroke.v1.Fleet")
        self.publish()
        await server.start()
        await server.set_serving(True)
        self._listening.set()
        log.info("supervisor up address=%s workers=%d", self._address, len(self._workers))
        keeper = asyncio.create_task(self._keep())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((keeper, stopping), return_when=asyncio.FIRST_COMPLETED)
            if keeper.done():
                keeper.result()
        finally:
            for task in (keeper, stopping):
                task.cancel()
            await asyncio.gather(keeper, stopping, return_exceptions=True)
            await server.stop(0)

    def _server(self) -> RpcServer:
        server = RpcServer(
            self._own_host(), self._spec.port, token=self._us.token or None, certificates=self._us.certificates
        )
        self._address = server.address
        return server

    def _own_host(self) -> str:
        return str(ray.util.get_node_ip_address()) if self._spec.host == NODE_ADDRESS else self._spec.host

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as lives:
            self._lives = lives
            lives.create_task(self._nodes.watch(lives))
            lives.create_task(self._pilot.run(self.residents))
            while True:
                changed = self._changed
                self._staff.look(lives)
                now_s = self._clock()
                step = plan([worker.observed for worker in self._workers.values()], now_s)
                for action in step.actions:
                    if isinstance(action, Create):
                        self._create(action.worker_id)
                    else:
                        self._change(action.worker_id, Stage.STARTING, serving=None)
                        lives.create_task(self._live(action.worker_id))
                if not step.actions:
                    pause_s = None if step.wake_at_s is None else max(0.0, step.wake_at_s - now_s)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), pause_s)

    def _create(self, worker_id: str) -> None:
        reach(Point.SUPERVISOR_CREATING)
        config = self._workers[worker_id].config
        found = self._ground.find(config)
        if found is not None:
            log.info("worker adopted worker=%s", worker_id)
        elif self._drains.ended(worker_id):
            self._change(worker_id, Stage.DRAINED)
            return
        self._handles[worker_id] = found or self._ground.create(config)
        self._change(worker_id, Stage.IDLE)

    async def _live(self, worker_id: str) -> None:
        """One life of one worker, from before `run()` is called until it has ended."""
        handle = self._handles[worker_id]
        readiness: asyncio.Task[None] | None = None
        try:
            self._change(worker_id, place=await _place(worker_id, handle))
            incarnation, role = self._ground.next_incarnation(worker_id), self._staff.shall_be(worker_id)
            reach(Point.SUPERVISOR_STARTING)
            log.info("worker starts worker=%s role=%s incarnation=%d", worker_id, role, incarnation)
            readiness = asyncio.create_task(self._announce_when_ready(worker_id, incarnation, handle))
            await handle.run(incarnation, role)
            ending: ServeError = RETURNED
        except ServeError as error:
            ending = error
        finally:
            if readiness is not None:
                readiness.cancel()
        if not self._stopping.is_set():
            self._end(worker_id, ending)

    async def _announce_when_ready(self, worker_id: str, incarnation: int, handle: WorkerHandle) -> None:
        try:
            serving = await handle.ready(incarnation)
        except ServeError as error:
            # run() ends too, and it alone decides what happened.
            log.info("worker will not be ready worker=%s error=%s", worker_id, error)
            return
        reach(Point.SUPERVISOR_ANNOUNCING)
        log.info("worker serves worker=%s address=%s epoch=%s", worker_id, serving.address, serving.epoch)
        self._change(worker_id, Stage.SERVING, serving=serving)
        if self._lives is not None:
            self._drains.resume(worker_id, self._lives)
        await _recycle_when_frozen(worker_id, handle)

    def _end(self, worker_id: str, ending: ServeError) -> None:
        reach(Point.SUPERVISOR_MOURNING)
        worker = self._workers[worker_id]
        observed = worker.observed.end(self._clock(), misconfigured=isinstance(ending, ConfigError))
        self._workers[worker_id] = replace(worker, observed=observed, last_error=ending)
        self.publish()
        switches = self._drains.switches(worker_id) and ending is RETURNED
        if observed.stage is Stage.FAILED:
            log.error("worker cannot start worker=%s error=%s", worker_id, ending)
            self._handles.pop(worker_id).remove()  # its room is for others
            return
        if self._drains.ended(worker_id):
            log.info("worker has left worker=%s", worker_id)
            self._handles.pop(worker_id).remove()
            self._change(worker_id, Stage.DRAINED, serving=None)
            return
        if worker.observed.stage is Stage.DRAINING:
            log.info("worker ended as asked worker=%s", worker_id)
        else:
            log.warning(
                "worker died worker=%s error=%s crashes=%d restart_in_s=%.1f",
                *(worker_id, ending, observed.crashes, backoff_s(observed.crashes)),
            )
        if not switches and not isinstance(ending, WorkerDied):
            self._handles[worker_id].recycle()

    def _change(self, worker_id: str, stage: Stage | None = None, **facts: Place | Serving | None) -> None:
        worker = self._workers[worker_id]
        observed = worker.observed if stage is None else worker.observed.enter(stage, self._clock())
        returns = observed.stage is Stage.DRAINING and self._drains.returns(worker_id)
        self._workers[worker_id] = replace(worker, observed=observed, returns=returns, **facts)  # type: ignore[arg-type]  # place, serving
        self.publish()


class SupervisorActor(Supervisor):
    """Begins by itself: Ray starts it again after the head's death, and a launcher may be away.

    Ray constructs it on the event loop that its methods run on.
    """

    def __init__(self, spec: FleetSpec) -> None:
        configure_logging("supervisor", owns_files=True)
        super().__init__(spec)
        self.begin()


async def _place(worker_id: str, handle: WorkerHandle) -> Place:
    text = "worker has no process yet: Ray waits for a node with room for it worker=%s"
    tell = asyncio.get_running_loop().call_later(PLACED_S, log.warning, text, worker_id)
    try:
        return await handle.place()
    finally:
        tell.cancel()


async def _recycle_when_frozen(worker_id: str, handle: WorkerHandle) -> None:
    """A frozen process ends nothing by itself: routers go around it, and its memory and devices serve nobody."""
    try:
        while True:
            await asyncio.sleep(PING_S)
            async with listening(FROZEN_S):
                await handle.place()
    except TimeoutError:
        log.error("worker frozen: a new process takes its place worker=%s silent_s=%g", worker_id, FROZEN_S)
        handle.recycle()
    except ServeError as error:
        # run() ends too, and it alone decides what happened.
        log.info("worker not reached worker=%s error=%s", worker_id, error)


async def _remove(worker_id: str, handle: WorkerHandle) -> Ending:
    told_s, is_own = time.monotonic(), True
    try:
        await asyncio.wait_for(handle.shutdown(), SHUTDOWN_S)
    except WorkerDied:
        log.info("worker was gone already worker=%s", worker_id)
    except (ServeError, TimeoutError) as error:
        is_own = False
        log.warning("worker did not shut down by itself worker=%s error=%r", worker_id, error)
    handle.remove()
    return Ending(worker_id, time.monotonic() - told_s, is_own)
