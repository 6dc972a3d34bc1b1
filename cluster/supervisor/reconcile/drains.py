"""Drains workers: each hands over what it can and ends, then restarts, switches role or stays away.

What follows a drain is stored before anybody is told, so that a restarted supervisor continues with it.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from cluster.supervisor.backend import AfterDrain, FleetBackend, Nodes
from cluster.supervisor.fleet import SupervisedFleet
from cluster.supervisor.reconcile.plan import WorkerStage, leaves
from twostroke.base.errors import PeerLost, ServeError
from twostroke.base.fault_points import Point, reach
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""Deadline in seconds of a drain whose caller is not known any more."""
SWITCH_S = 3.0
"""Seconds for a worker that switches role to hand over its requests. The rest continues elsewhere all the same."""
END_S = 2.0
"""Seconds from a worker's shutdown or death until the supervisor must have noticed; after that it is killed."""
RELEASE_S = 10.0
"""Seconds for a process to free model and pages before a new process takes its place."""
ANSWER_S = 5.0
"""Seconds after its deadline in which a draining worker answers, if it is alive."""
LOOK_S = 2.0
"""Seconds between two looks. A preemption is announced half a minute ahead or more."""


class Drains:
    """The drains in progress; each is a task of `tasks`."""

    def __init__(
        self, fleet: SupervisedFleet, backend: FleetBackend, membership: Membership, shutdown_s: float
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._membership = membership
        self._shutdown_s = shutdown_s
        self._running: dict[str, asyncio.Task[int]] = {}

    async def drain(self, worker_id: str, deadline_s: float, restart: bool, tasks: asyncio.TaskGroup) -> int:
        """Drains a worker; returns how many requests were cut off, once it has left or serves again.

        A drain in progress is joined. Raises NotFound, or PeerLost where the worker does not serve.
        """
        if self._fleet.stage(worker_id) is WorkerStage.SERVING:
            await self.until_over(worker_id)
        stage = self._fleet.stage(worker_id)
        if stage is WorkerStage.DRAINED:
            if restart:
                await self._bring_back(worker_id)
            return 0
        if stage not in (WorkerStage.SERVING, WorkerStage.DRAINING):
            raise PeerLost(f"{worker_id} is {stage}: only a worker that serves can be drained; try again later")
        self._backend.set_after_drain(worker_id, AfterDrain.RESTART if restart else AfterDrain.REMOVE)
        return await asyncio.shield(self._begin(worker_id, deadline_s, tasks))

    async def put_to_sleep(self, worker_id: str, deadline_s: float, tasks: asyncio.TaskGroup) -> int:
        """Returns how many requests were cut off, once the worker's process has neither model nor pages.

        Raises NotFound, or PeerLost where the worker does not serve.
        """
        if self._fleet.stage(worker_id) is not WorkerStage.SERVING or worker_id in self._running:
            raise PeerLost(f"{worker_id} is {self._fleet.stage(worker_id)}: only a worker that serves can sleep")
        self._backend.set_after_drain(worker_id, AfterDrain.SLEEP)
        return await asyncio.shield(self._begin(worker_id, deadline_s, tasks))

    async def switch(self, worker_id: str, deadline_s: float, tasks: asyncio.TaskGroup) -> int:
        """Returns how many requests were cut off, once the worker serves in its new role, in the same process if it
        can.

        Its cache stays with it. Raises NotFound, or PeerLost where the worker does not serve.
        """
        if self._fleet.stage(worker_id) is not WorkerStage.SERVING or worker_id in self._running:
            raise PeerLost(f"{worker_id} is {self._fleet.stage(worker_id)}: only a worker that serves can switch")
        self._backend.set_after_drain(worker_id, AfterDrain.SWITCH_ROLE)
        return await asyncio.shield(self._begin(worker_id, deadline_s, tasks))

    def lingers(self, worker_id: str) -> bool:
        """Returns whether a drain has not ended. A worker that serves meanwhile does so in the epoch before."""
        return worker_id in self._running

    async def until_over(self, worker_id: str) -> None:
        while worker_id in self._running:
            await asyncio.wait([self._running[worker_id]])

    def move(self, worker_id: str, deadline_s: float, tasks: asyncio.TaskGroup) -> None:
        """Drains a worker that serves; its next epoch begins where Ray then puts it.

        Nothing happens while an earlier drain is about to end; the caller asks again later.
        """
        if worker_id not in self._running:
            self._backend.set_after_drain(worker_id, AfterDrain.RESTART)
            self._begin(worker_id, deadline_s, tasks)

    def resume(self, worker_id: str, tasks: asyncio.TaskGroup, *, shall_switch: bool) -> None:
        """Continues an earlier supervisor's drain. `shall_switch`: the worker serves in another role than it should."""
        after_drain = self._backend.after_drain(worker_id)
        if after_drain is AfterDrain.SWITCH_ROLE and not shall_switch:
            self._backend.set_after_drain(worker_id, None)  # the switch is done
        elif after_drain is not None:
            self._begin(worker_id, SWITCH_S if after_drain is AfterDrain.SWITCH_ROLE else DEADLINE_S, tasks)

    def ended(self, worker_id: str) -> bool:
        """Notes that an epoch is over, or that there is none. Returns True where none follows."""
        if self._backend.after_drain(worker_id) is AfterDrain.REMOVE:
            return True
        self._backend.set_after_drain(worker_id, None)
        return False

    def switches(self, worker_id: str) -> bool:
        """Returns whether the next epoch begins in the same process."""
        return self._backend.after_drain(worker_id) is AfterDrain.SWITCH_ROLE

    def sleeps(self, worker_id: str) -> bool:
        """Returns whether the process stays without an epoch."""
        return self._backend.after_drain(worker_id) is AfterDrain.SLEEP

    def _returns(self, worker_id: str) -> bool:
        """Returns whether it drains and a new epoch of the same role follows."""
        return self._backend.after_drain(worker_id) is AfterDrain.RESTART

    def _begin(self, worker_id: str, deadline_s: float, tasks: asyncio.TaskGroup) -> asyncio.Task[int]:
        running = self._running.get(worker_id)
        if running is None:
            serving = self._fleet.worker(worker_id).serving
            assert serving is not None, "only what serves is drained"
            # The address is read now: by the time the task begins, this epoch may be over.
            address = serving.address
            self._fleet.enter(worker_id, WorkerStage.DRAINING, returns=self._returns(worker_id))
            running = self._running[worker_id] = tasks.create_task(self._drain(worker_id, address, deadline_s))
            running.add_done_callback(lambda _: self._over(worker_id))
        return running

    def _over(self, worker_id: str) -> None:
        del self._running[worker_id]
        self._fleet.wake()

    async def _bring_back(self, worker_id: str) -> None:
        self._backend.set_after_drain(worker_id, None)
        self._fleet.enter(worker_id, WorkerStage.ABSENT)
        settled = (WorkerStage.SERVING, WorkerStage.FAILED, WorkerStage.ASLEEP)
        await self._fleet.until(worker_id, lambda stage: stage in settled)
        if self._fleet.stage(worker_id) is WorkerStage.ASLEEP:
            raise PeerLost(f"{worker_id} was told to sleep: it serves again with: twostroke wake {worker_id}")

    async def _drain(self, worker_id: str, address: str, deadline_s: float) -> int:
        fleet = self._fleet
        log.info("drain worker=%s deadline_s=%.1f then=%s", worker_id, deadline_s, self._backend.after_drain(worker_id))
        reach(Point.SUPERVISOR_DRAINING)
        left = 0
        try:
            left = await self._ask(worker_id, address, deadline_s)
            if fleet.stage(worker_id) is WorkerStage.DRAINING:  # and not the epoch after it
                await asyncio.wait_for(fleet.handle(worker_id).shutdown(), self._shutdown_s)
        except (ServeError, TimeoutError) as error:
            log.warning("worker does not leave by itself worker=%s error=%r", worker_id, error)
        await self._make_end(worker_id)
        if self.sleeps(worker_id):
            await self._release(worker_id)
        await fleet.until(
            worker_id,
            lambda stage: stage in (WorkerStage.SERVING, WorkerStage.ASLEEP, WorkerStage.DRAINED, WorkerStage.FAILED),
        )
        log.info("drained worker=%s cut_off=%d stage=%s", worker_id, left, fleet.stage(worker_id))
        return left

    async def _release(self, worker_id: str) -> None:
        """Frees what the epoch has left in the process. A process that cannot is replaced by a new one."""
        handle = self._fleet.handle(worker_id)
        try:
            await asyncio.wait_for(handle.release(), RELEASE_S)
        except (ServeError, TimeoutError) as error:
            log.warning("memory not released, a new process sleeps instead worker=%s error=%r", worker_id, error)
            handle.recycle()
        self._backend.set_after_drain(worker_id, None)

    async def _make_end(self, worker_id: str) -> None:
        """Kills the worker unless it ends by itself. One that has died is not killed again."""
        try:
            async with asyncio.timeout(END_S):
                await self._fleet.until(worker_id, lambda stage: stage is not WorkerStage.DRAINING)
        except TimeoutError:
            self._fleet.handle(worker_id).recycle()
            await self._fleet.until(worker_id, lambda stage: stage is not WorkerStage.DRAINING)

    async def _ask(self, worker_id: str, address: str, deadline_s: float) -> int:
        peer = PeerChannel(address, self._membership)
        successors = [] if self.switches(worker_id) else self._fleet.successors(worker_id)
        request = control_pb2.DrainRequest(deadline_s=deadline_s, successors=successors)
        try:
            answer = await control_pb2_grpc.ControlStub(peer.channel).Drain(
                request, metadata=peer.metadata, timeout=call_timeout_s(deadline_s + ANSWER_S)
            )
        except grpc.aio.AioRpcError as error:
            raise error_of(error, address) from error
        finally:
            await peer.close()
        return answer.open_requests


class NodeWatch:
    """Watches for Ray nodes that are about to end and drains their workers, which then restart elsewhere.

    Ray puts nothing on such a node any more, restarted actors included, so a new process is all that a worker needs.
    """

    def __init__(self, backend: FleetBackend, fleet: SupervisedFleet, drains: Drains) -> None:
        self._backend = backend
        self._fleet = fleet
        self._drains = drains
        self._nodes = Nodes({}, has_others=True)
        self._is_answered = True

    async def watch(self, tasks: asyncio.TaskGroup) -> None:
        """Watches until cancelled; each drain is a task of `tasks`."""
        while True:
            try:
                self._look(await self._backend.nodes(), tasks)
                self._is_answered = True
            except PeerLost as error:
                if self._is_answered:
                    log.warning("nodes unknown error=%s", error)
                self._is_answered = False
            await asyncio.sleep(LOOK_S)

    def _look(self, nodes: Nodes, tasks: asyncio.TaskGroup) -> None:
        before, self._nodes = self._nodes, nodes
        self._fleet.leave_nodes(nodes.leaving)
        placed_workers = self._fleet.placed_workers()
        for node_id in nodes.leaving.keys() - before.leaving.keys():
            workers = [worker.worker_id for worker in placed_workers if worker.node_id == node_id]
            log.info(
                "node should be left node=%s ends_in_s=%.1f workers=%s",
                *(node_id, nodes.leaving[node_id], ",".join(workers)),
            )
            if workers and not nodes.has_others:
                log.warning("no other node: workers stay until the end is near, then wait for a node node=%s", node_id)
        for leave in leaves(placed_workers, nodes.leaving, has_others=nodes.has_others):
            self._drains.move(leave.worker_id, leave.deadline_s, tasks)
