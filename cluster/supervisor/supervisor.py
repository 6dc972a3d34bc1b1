"""Keeps the fleet alive: observes, plans, acts, and tells every watcher at once what has changed."""

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

from cluster.launch.exits import ProcessExit
from cluster.ray.backend import Backend, RayBackend, WorkerDied, WorkerHandle
from cluster.scaling.autoscaler import Autoscaler
from cluster.scaling.desired_state import Checkpoint
from cluster.scaling.reconciler import CRASHES_TO_GIVE_UP, Reconciler
from cluster.spec import NODE_ADDRESS, FleetSpec
from cluster.supervisor.actors import ActorLocation, Serving
from cluster.supervisor.adapters import NamedAdapters
from cluster.supervisor.drains import Drains
from cluster.supervisor.fleet_service import FleetService
from cluster.supervisor.node_watch import NodeWatch
from cluster.supervisor.pins import FleetPins, PinHolder
from cluster.supervisor.plan import Create, Observed, PlacedWorker, WorkerStage, backoff_s, plan
from cluster.supervisor.view import FleetSnapshot, SupervisedWorker
from cluster.supervisor.weights import routed_fingerprint
from cluster.supervisor.worker_process import SHUTDOWN_S, place_of, recycle_when_frozen, remove
from twostroke.config import Role, WorkerConfig
from twostroke.errors import ConfigError, InternalError, NotFound, PeerLost, ServeError
from twostroke.fault_points import Point, reach
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import adapters_pb2_grpc, control_pb2, fleet_pb2, fleet_pb2_grpc, pins_pb2_grpc
from twostroke.telemetry import configure_logging

log = logging.getLogger(__name__)

ROOM_S = 60.0
"""Seconds after which a worker that Ray has no node for is not waited for: a reload goes on with the others."""

RETURNED = InternalError("run() returned although nobody asked the worker to shut down")


class Supervisor:
    """The supervisor as a plain class; `SupervisorActor` is the actor."""

    def __init__(
        self, spec: FleetSpec, backend: Backend | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._membership = Membership.of(spec.token, spec.tls)
        worker_count = sum(bounds.most for bounds in spec.bounds)
        self._backend = backend or RayBackend(worker_count=worker_count, roles=spec.roles)
        self._clock = clock
        self._workers: dict[str, SupervisedWorker] = {}
        self._handles: dict[str, WorkerHandle] = {}
        self._without_room: set[str] = set()
        """Workers whose next process has waited for a node for `ROOM_S`."""
        self._drains = Drains(self, self._backend, self._membership, SHUTDOWN_S)
        self._reconciler = Reconciler(self, self._backend, self._drains, spec)
        self._autoscaler = Autoscaler(self._reconciler, spec, clock)
        self._service = FleetService(self.drain, self._autoscaler.report, self.assign_role)
        self._pins = FleetPins(self._pin_holders, self._backend, self._membership)
        self._adapters = NamedAdapters(self._backend, self._publish_now, self._addresses, self._membership)
        self._nodes = NodeWatch(self._backend, self.placed_workers, self._drains)
        self._worker_tasks: asyncio.TaskGroup | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._listening = asyncio.Event()
        self._address = ""
        self._run_task: asyncio.Task[None] | None = None
        for config in self._reconciler.configs():
            self.add(config)

    async def run(self) -> None:
        """Serve Fleet and keep the workers alive until `stop`. A second call joins the run in progress."""
        await asyncio.shield(self.begin())

    def begin(self) -> asyncio.Task[None]:
        """Start `run` in the background."""
        if self._run_task is None:
            self._run_task = asyncio.create_task(self._run())
        return self._run_task

    async def address(self) -> str:
        """Return the address of the Fleet service once it listens."""
        await self._listening.wait()
        return self._address

    async def spec(self) -> FleetSpec:
        """Return the spec it was started with, for a launcher that adopts the fleet."""
        return self._spec

    async def snapshot(self, after_version: int = -1, timeout_s: float = 1.0) -> FleetSnapshot:
        """Return the fleet now, or as soon as it is newer than `after_version`."""
        if self._version <= after_version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return FleetSnapshot(self._version, tuple(self._workers.values()))

    async def drain(self, worker_id: str, deadline_s: float, restart: bool, force: bool = False) -> int:
        """Drain a worker; return how many requests were cut off, once it has left or serves again (see `Drains`).

        The last worker of its role leaves for good only with `force`; else this raises InvalidRequest. None restarts
        while others load weights or fall asleep: this raises PeerLost.
        """
        if restart:
            self._reconciler.check_may_restart(worker_id)
        elif not force:
            self._reconciler.check_may_leave(worker_id)
        return await self._drains.drain(worker_id, deadline_s, restart, self._tasks())

    async def sleep(self, worker_id: str, deadline_s: float, force: bool = False) -> None:
        """Drain a worker and free its memory; return when its process has neither model nor pages.

        The last worker of its role sleeps only with `force`; else this raises InvalidRequest.
        """
        self._tasks()
        if not force:
            self._reconciler.check_may_leave(worker_id)
        await self._reconciler.put_to_sleep(worker_id, deadline_s)

    async def wake_up(self, worker_id: str) -> None:
        """Let a worker that is asleep load its model; return when it serves."""
        self._tasks()
        await self._reconciler.wake_up(worker_id)

    async def reload(self, model: str, deadline_s: float) -> list[str]:
        """Let all workers load these weights, one at a time; an empty name means the model that they have.

        Returns when all workers that serve have them, and which do not serve since Ray has no node for them: these
        begin with the new weights. Raises ConfigError where the model cannot take the place of the
        one that is served, or cannot be loaded; then the weights stay as they were.
        """
        self._tasks()
        return await self._reconciler.reload(model, deadline_s)

    async def assign_role(self, worker_id: str, role: str) -> None:
        """Switch a worker to the other role; return when it serves in it."""
        self._tasks()
        await self._reconciler.assign(worker_id, Role(role))

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, automatic: bool = False
    ) -> dict[str, Any]:
        """Set the wanted counts, or let the planner decide (`automatic`). Returns what `scaling` returns."""
        self._tasks()
        self._autoscaler.set_counts(prefill, decode, is_automatic=automatic)
        return await self.scaling()

    async def scaling(self) -> dict[str, Any]:
        """Return a `ScalingStatus` as plain values."""
        return dataclasses.asdict(self._autoscaler.status(self.placed_workers()))

    def _tasks(self) -> asyncio.TaskGroup:
        """Return the task group for what operators ask. Raises PeerLost while the fleet starts or stops."""
        if self._worker_tasks is None:
            raise PeerLost("the supervisor is starting; try again")
        if self._stopping.is_set():  # what is stored now would outlive the fleet
            raise PeerLost("the fleet is being stopped")
        return self._worker_tasks

    # What drains and the reconciler need

    def add(self, config: WorkerConfig) -> None:
        self._workers[config.worker_id] = SupervisedWorker(config, Observed(config.worker_id))
        self.wake()

    def forget(self, worker_id: str) -> None:
        """Remove a worker that has left for good."""
        del self._workers[worker_id]
        handle = self._handles.pop(worker_id, None)
        if handle is not None:
            handle.remove()
        self.publish()

    def publish(self) -> None:
        """Tell watchers and launchers the current state."""
        self._version += 1
        away = (WorkerStage.DRAINED, WorkerStage.ASLEEP)  # routers wait for what is listed and does not serve
        messages = [worker.to_message() for worker in self._workers.values() if worker.observed.stage not in away]
        serving = [worker.serving for worker in self._workers.values() if worker.serving is not None]
        view = fleet_pb2.FleetView(
            version=self._version,
            workers=messages,
            scaling=self._reconciler.to_message(),
            fingerprint=routed_fingerprint(serving, self._reconciler.desired.weights),
            adapters=self._adapters.to_messages(),
        )
        self._service.publish(view)
        self.wake()

    def _publish_now(self) -> int:
        """Publish, and return the version that watchers get."""
        self.publish()
        return self._version

    def _addresses(self) -> list[str]:
        return [each.serving.address for each in self._pin_holders() if each.serving is not None]

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def role(self, worker_id: str) -> Role:
        return self._workers[worker_id].role

    def checkpoint(self, worker_id: str) -> Checkpoint | None:
        """Return the weights that a worker serves with; None while it does not serve."""
        if worker_id not in self._workers:
            raise NotFound(f"there is no worker {worker_id!r}")
        worker = self._workers[worker_id]
        is_up = worker.observed.stage is WorkerStage.SERVING and worker.serving is not None
        return worker.serving.checkpoint if is_up and worker.serving is not None else None

    def has_no_room(self, worker_id: str) -> bool:
        return worker_id in self._without_room

    def shall_switch(self, worker_id: str) -> bool:
        return self._reconciler.shall_switch(worker_id)

    def stage(self, worker_id: str) -> WorkerStage:
        if worker_id not in self._workers:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(self._workers)}")
        return self._workers[worker_id].observed.stage

    def enter(self, worker_id: str, stage: WorkerStage) -> None:
        self._change(worker_id, stage)

    async def until_change(self) -> None:
        await self._changed.wait()

    async def until(self, worker_id: str, is_so: Callable[[WorkerStage], bool]) -> None:
        while not is_so(self.stage(worker_id)):
            await self._changed.wait()

    def serving(self, worker_id: str) -> Serving:
        serving = self._workers[worker_id].serving
        assert serving is not None, "only what serves is drained"
        return serving

    def successors(self, worker_id: str) -> Sequence[control_pb2.Successor]:
        role, left = self._workers[worker_id].role, self._workers[worker_id].serving
        return [
            control_pb2.Successor(worker_id=other, address=worker.serving.address, epoch=worker.serving.epoch)
            for other, worker in self._workers.items()
            if other != worker_id
            and worker.role is role
            and worker.observed.stage is WorkerStage.SERVING
            and worker.serving is not None
            and (left is None or worker.serving.checkpoint == left.checkpoint)
            and not (worker.place and self._nodes.leaves(worker.place.node_id))
        ]

    def handle(self, worker_id: str) -> WorkerHandle:
        if worker_id not in self._handles:
            raise NotFound(f"{worker_id} has no process")
        return self._handles[worker_id]

    def placed_workers(self) -> list[PlacedWorker]:
        return [
            PlacedWorker(worker_id, worker.role, worker.observed.stage, worker.place.node_id if worker.place else None)
            for worker_id, worker in self._workers.items()
        ]

    def _pin_holders(self) -> list[PinHolder]:
        serving = WorkerStage.SERVING
        return [
            PinHolder(worker_id, worker.role, worker.serving if worker.observed.stage is serving else None)
            for worker_id, worker in self._workers.items()
            if worker.observed.stage is not WorkerStage.DRAINED
        ]

    async def stop(self) -> tuple[ProcessExit, ...]:
        """Shut every worker down and remove it, then end `run`. Returns how each worker ended."""
        self._stopping.set()
        exits = await asyncio.gather(*(remove(worker_id, handle) for worker_id, handle in self._handles.items()))
        self._handles.clear()
        await self._adapters.stop()
        await self._pins.stop()  # what is stored now would outlive the fleet
        self._backend.forget()
        return tuple(exits)

    async def _run(self) -> None:
        server = self._server()
        fleet_pb2_grpc.add_FleetServicer_to_server(self._service, server.server)
        server.offer("twostroke.v1.Fleet")
        pins_pb2_grpc.add_PinsServicer_to_server(self._pins, server.server)
        server.offer("twostroke.v1.Pins")
        adapters_pb2_grpc.add_AdaptersServicer_to_server(self._adapters, server.server)
        server.offer("twostroke.v1.Adapters")
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
            await self._pins.stop()

    def _server(self) -> RpcServer:
        server = RpcServer(
            self._own_host(),
            self._spec.port,
            token=self._membership.token or None,
            certificates=self._membership.certificates,
        )
        self._address = server.address
        return server

    def _own_host(self) -> str:
        return str(ray.util.get_node_ip_address()) if self._spec.host == NODE_ADDRESS else self._spec.host

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._worker_tasks = tasks
            tasks.create_task(self._nodes.watch(tasks))
            tasks.create_task(self._autoscaler.run(self.placed_workers))
            while True:
                changed = self._changed
                self._reconciler.look(tasks)
                now_s = self._clock()
                step = plan([worker.observed for worker in self._workers.values()], now_s)
                for action in step.actions:
                    if isinstance(action, Create):
                        self._create(action.worker_id)
                    else:
                        self._change(action.worker_id, WorkerStage.STARTING, serving=None)
                        tasks.create_task(self._run_worker(action.worker_id))
                if not step.actions:
                    pause_s = None if step.wake_at_s is None else max(0.0, step.wake_at_s - now_s)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), pause_s)

    def _create(self, worker_id: str) -> None:
        reach(Point.SUPERVISOR_CREATING)
        config = self._workers[worker_id].config
        found = self._backend.find(config)
        if found is not None:
            log.info("worker found worker=%s", worker_id)
        elif self._drains.ended(worker_id):
            self._change(worker_id, WorkerStage.DRAINED)
            return
        self._handles[worker_id] = found or self._backend.create(config)
        self._change(worker_id, WorkerStage.IDLE)

    async def _run_worker(self, worker_id: str) -> None:
        """Run one epoch of one worker, from before `run()` is called until it has ended."""
        handle = self._handles[worker_id]
        readiness: asyncio.Task[None] | None = None
        try:
            place = await self._placed(worker_id, handle)
            self._change(worker_id, place=place)
            if place.is_idle and self._reconciler.shall_sleep(worker_id):
                await handle.release()
                self._drains.ended(worker_id)  # an earlier process of the supervisor may have begun it
                self._change(worker_id, WorkerStage.ASLEEP)
                return
            incarnation, role = self._backend.next_incarnation(worker_id), self._reconciler.shall_be(worker_id)
            reach(Point.SUPERVISOR_STARTING)
            log.info("worker starts worker=%s role=%s incarnation=%d", worker_id, role, incarnation)
            readiness = asyncio.create_task(self._announce_when_ready(worker_id, incarnation, handle))
            await handle.run(incarnation, role, self._reconciler.desired.weights.wanted)
            ending: ServeError = RETURNED
        except ServeError as error:
            ending = error
        finally:
            if readiness is not None:
                readiness.cancel()
        if not self._stopping.is_set():
            self._end(worker_id, ending)

    async def _placed(self, worker_id: str, handle: WorkerHandle) -> ActorLocation:
        """Return where the worker's process is, once there is one."""

        def go_on_without() -> None:
            self._without_room.add(worker_id)
            self.wake()

        waits = asyncio.get_running_loop().call_later(ROOM_S, go_on_without)
        try:
            return await place_of(worker_id, handle)
        finally:
            waits.cancel()
            self._without_room.discard(worker_id)

    async def _announce_when_ready(self, worker_id: str, incarnation: int, handle: WorkerHandle) -> None:
        try:
            serving = await handle.ready(incarnation)
        except ServeError as error:
            # run() ends too; its error says what happened.
            log.info("worker will not be ready worker=%s error=%s", worker_id, error)
            return
        reach(Point.SUPERVISOR_ANNOUNCING)
        log.info("worker serves worker=%s address=%s epoch=%s", worker_id, serving.address, serving.epoch)
        self._change(worker_id, WorkerStage.SERVING, serving=serving)
        if self._worker_tasks is not None:
            self._drains.resume(worker_id, self._worker_tasks)
            self._worker_tasks.create_task(self._pins.give(worker_id))
        await recycle_when_frozen(worker_id, handle)

    def _end(self, worker_id: str, ending: ServeError) -> None:
        reach(Point.SUPERVISOR_WORKER_ENDED)
        worker = self._workers[worker_id]
        observed = worker.observed.end(self._clock(), misconfigured=isinstance(ending, ConfigError))
        self._workers[worker_id] = replace(worker, observed=observed, last_error=ending)
        self.publish()
        if worker.observed.stage is WorkerStage.STARTING or observed.crashes >= CRASHES_TO_GIVE_UP:
            self._reconciler.could_not_serve(worker_id, ending, observed.crashes)
        self._prepare_next(worker_id, worker.observed.stage, observed, ending)

    def _prepare_next(self, worker_id: str, before: WorkerStage, observed: Observed, ending: ServeError) -> None:
        """Let the process of an ended epoch go, sleep, or make room for the next epoch."""
        switches = self._drains.switches(worker_id) and ending is RETURNED
        if observed.stage is WorkerStage.FAILED:
            log.error("worker cannot start worker=%s error=%s", worker_id, ending)
            self._handles.pop(worker_id).remove()  # others may use its place
            return
        if self._drains.sleeps(worker_id) and ending is RETURNED:
            log.info("worker falls asleep worker=%s", worker_id)
            self._change(worker_id, WorkerStage.ASLEEP, serving=None)
            return
        if self._drains.ended(worker_id):
            log.info("worker has left worker=%s", worker_id)
            self._handles.pop(worker_id).remove()
            self._change(worker_id, WorkerStage.DRAINED, serving=None)
            return
        if before is WorkerStage.DRAINING:
            log.info("worker ended as asked worker=%s", worker_id)
        else:
            log.warning(
                "worker died worker=%s error=%s crashes=%d restart_in_s=%.1f",
                *(worker_id, ending, observed.crashes, backoff_s(observed.crashes)),
            )
        if not switches and not isinstance(ending, WorkerDied):
            self._handles[worker_id].recycle()

    def _change(
        self, worker_id: str, stage: WorkerStage | None = None, **facts: ActorLocation | Serving | None
    ) -> None:
        worker = self._workers[worker_id]
        observed = worker.observed if stage is None else worker.observed.enter(stage, self._clock())
        returns = observed.stage is WorkerStage.DRAINING and self._drains.returns(worker_id)
        self._workers[worker_id] = replace(worker, observed=observed, returns=returns, **facts)  # type: ignore[arg-type]  # place, serving
        self.publish()


class SupervisorActor(Supervisor):
    """The actor. It begins by itself, because Ray restarts it after the head's death and a launcher may be away.

    Ray constructs it on the event loop that its methods run on.
    """

    def __init__(self, spec: FleetSpec) -> None:
        configure_logging("supervisor", owns_files=True)
        super().__init__(spec)
        self.begin()
