"""Keeps the fleet alive: observes, plans, acts, and tells every watcher at once what has changed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.supervisor.backend import FleetBackend
from cluster.supervisor.branches import branches_of
from cluster.supervisor.epochs import WorkerEpochs
from cluster.supervisor.fleet import Changes, SupervisedFleet
from cluster.supervisor.fleet_service import FleetService
from cluster.supervisor.reconcile.autoscaler import Autoscaler
from cluster.supervisor.reconcile.commands import WorkerCommands
from cluster.supervisor.reconcile.desired import DesiredFleet
from cluster.supervisor.reconcile.drains import Drains, NodeWatch
from cluster.supervisor.reconcile.parts import FleetParts
from cluster.supervisor.reconcile.plan import Create, WorkerStage, plan
from cluster.supervisor.reconcile.reconciler import Reconciler
from cluster.supervisor.reconcile.reloads import Reloads
from cluster.supervisor.reconcile.weights import routed_fingerprint
from cluster.supervisor.view import FleetSnapshot
from cluster.supervisor.worker_process import SHUTDOWN_S
from cluster.values.exits import ProcessExit
from cluster.values.spec import NODE_ADDRESS, FleetSpec
from twostroke.base.errors import PeerLost
from twostroke.config import Role
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

_AWAY = frozenset({WorkerStage.DRAINED, WorkerStage.ASLEEP})
"""Stages of workers that are not listed: routers wait for what is listed and does not serve."""


class Supervisor:
    """The supervisor as a plain class; `cluster/ray/session.py` has the actor."""

    def __init__(self, spec: FleetSpec, backend: FleetBackend, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._membership = Membership.of(spec.token, spec.tls)
        self._backend = backend
        self._clock = clock
        fleet = self._fleet = SupervisedFleet(clock)
        desired = self._desired = DesiredFleet(fleet, backend, spec)
        drains = self._drains = Drains(fleet, backend, self._membership, SHUTDOWN_S)
        changes = Changes(fleet)
        reloads = self._reloads = Reloads(fleet, desired, drains, changes, spec)
        parts = FleetParts(spec, fleet, backend, desired, drains, changes, reloads)
        self._reconciler = Reconciler(parts)
        self._commands = WorkerCommands(parts, self._reconciler)
        self._autoscaler = Autoscaler(desired, spec, clock)
        self._service = FleetService(self.drain, self._autoscaler.report, self.assign_role)
        self._branches = branches_of(fleet, backend, self._membership)
        self._epochs = WorkerEpochs(parts, [branch.begun for branch in self._branches])
        self._nodes = NodeWatch(backend, fleet, drains)
        self._worker_tasks: asyncio.TaskGroup | None = None
        self._stopping = asyncio.Event()
        self._listening = asyncio.Event()
        self._address = ""
        self._run_task: asyncio.Task[None] | None = None
        fleet.listen(self._send_view)
        for worker_id in desired.state.slots:
            fleet.add(desired.config(worker_id))

    async def run(self) -> None:
        """Serves Fleet and keeps the workers alive until `stop`. A second call joins the run in progress."""
        await asyncio.shield(self.begin())

    def begin(self) -> asyncio.Task[None]:
        """Starts `run` in the background."""
        if self._run_task is None:
            self._run_task = asyncio.create_task(self._run())
        return self._run_task

    async def address(self) -> str:
        """Returns the address of the Fleet service once it listens."""
        await self._listening.wait()
        return self._address

    async def spec(self) -> FleetSpec:
        """Returns the spec it was started with, for a launcher that adopts the fleet."""
        return self._spec

    async def snapshot(self, after_version: int = -1, timeout_s: float = 1.0) -> FleetSnapshot:
        """Returns the fleet now, or as soon as it is newer than `after_version`."""
        return await self._fleet.snapshot(after_version, timeout_s)

    async def drain(self, worker_id: str, deadline_s: float, restart: bool, force: bool = False) -> int:
        """Drains a worker; returns how many requests were cut off, once it has left or serves again (see `Drains`).

        The last worker of its role leaves for good only with `force`; else this raises InvalidRequest. None restarts
        while others load weights or fall asleep: this raises PeerLost.
        """
        if restart:
            self._commands.check_may_restart(worker_id)
        elif not force:
            self._commands.check_may_leave(worker_id)
        return await self._drains.drain(worker_id, deadline_s, restart, self._tasks())

    async def sleep(self, worker_id: str, deadline_s: float, force: bool = False) -> None:
        """Drains a worker and frees its memory; returns when its process has neither model nor pages.

        The last worker of its role sleeps only with `force`; else this raises InvalidRequest.
        """
        self._tasks()
        if not force:
            self._commands.check_may_leave(worker_id)
        await self._commands.put_to_sleep(worker_id, deadline_s)

    async def wake_up(self, worker_id: str) -> None:
        """Lets a worker that is asleep load its model; returns when it serves."""
        self._tasks()
        await self._commands.wake_up(worker_id)

    async def reload(self, model: str, deadline_s: float) -> list[str]:
        """Lets all workers load these weights, one at a time; an empty name means the model that they have.

        Returns when all workers that serve have them. The result names those that Ray has no node for: they will begin
        with the new weights. Raises ConfigError where the model cannot take the place of the one that is served, or
        cannot be loaded. Then the weights stay as they were.
        """
        self._tasks()
        return await self._reloads.reload(model, deadline_s)

    async def assign_role(self, worker_id: str, role: str) -> None:
        """Switches a worker to the other role; returns when it serves in it."""
        self._tasks()
        await self._commands.assign(worker_id, Role(role))

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, automatic: bool = False
    ) -> dict[str, Any]:
        """Sets the wanted counts, or lets the planner decide (`automatic`). Returns what `scaling` returns."""
        self._tasks()
        self._autoscaler.set_counts(prefill, decode, is_automatic=automatic)
        return await self.scaling()

    async def scaling(self) -> dict[str, Any]:
        """Returns a `ScalingStatus` as plain values."""
        return dataclasses.asdict(self._autoscaler.status(self._fleet.placed_workers()))

    def _tasks(self) -> asyncio.TaskGroup:
        """Returns the task group for what operators ask. Raises PeerLost while the fleet starts or stops."""
        if self._worker_tasks is None:
            raise PeerLost("the supervisor is starting; try again")
        if self._stopping.is_set():  # what is stored now would outlive the fleet
            raise PeerLost("the fleet is being stopped")
        return self._worker_tasks

    async def stop(self) -> tuple[ProcessExit, ...]:
        """Shuts every worker down and removes it, then ends `run`. Returns how each worker ended."""
        self._stopping.set()
        self._epochs.stop()
        exits = await self._fleet.remove_processes()
        await self._stop_branches()  # what is stored now would outlive the fleet
        self._backend.forget()
        return exits

    async def _run(self) -> None:
        server = self._server()
        fleet_pb2_grpc.add_FleetServicer_to_server(self._service, server.server)
        server.offer("twostroke.v1.Fleet")
        for branch in self._branches:
            branch.add_to(server.server)
            server.offer(f"twostroke.v1.{branch.service}")
        self._fleet.publish()
        await server.start()
        await server.set_serving(True)
        self._listening.set()
        log.info("supervisor up address=%s workers=%d", self._address, len(self._fleet.workers()))
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
            await self._stop_branches()

    async def _stop_branches(self) -> None:
        for branch in self._branches:
            await branch.stop()

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
            tasks.create_task(self._autoscaler.run(self._fleet.placed_workers))
            while True:
                changed = self._fleet.changed
                self._reconciler.look(tasks)
                now_s = self._clock()
                step = plan([worker.observed for worker in self._fleet.workers()], now_s)
                for action in step.actions:
                    if isinstance(action, Create):
                        self._epochs.create(action.worker_id)
                    else:
                        self._epochs.start(action.worker_id, tasks)
                if not step.actions:
                    pause_s = None if step.wake_at_s is None else max(0.0, step.wake_at_s - now_s)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), pause_s)

    # What routers are told

    def _send_view(self, version: int) -> None:
        workers = self._fleet.workers()
        serving = [worker.serving for worker in workers if worker.serving is not None]
        view = fleet_pb2.FleetView(
            version=version,
            workers=[worker.to_message() for worker in workers if worker.observed.stage not in _AWAY],
            scaling=self._scaling_message(),
            fingerprint=routed_fingerprint(serving, self._desired.state.weights),
        )
        for branch in self._branches:
            branch.add_to_view(view)
        self._service.publish(view)

    def _scaling_message(self) -> fleet_pb2.Scaling:
        wanted = self._desired.wanted
        return fleet_pb2.Scaling(
            wanted_prefill=wanted.prefill,
            wanted_decode=wanted.decode,
            automatic=self._desired.state.is_automatic,
            changes=self._desired.changes,
            switches=self._reconciler.switches,
            reloading=self._reloads.is_running,
        )
