"""Creates the workers' processes and runs one epoch after the other in them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence

from cluster.supervisor.actors import ActorLocation
from cluster.supervisor.backend import WorkerDied, WorkerHandle
from cluster.supervisor.reconcile.parts import FleetParts
from cluster.supervisor.reconcile.plan import Observed, WorkerStage, backoff_s
from cluster.supervisor.reconcile.reloads import CRASHES_TO_GIVE_UP
from cluster.supervisor.worker_process import place_of, recycle_when_frozen
from twostroke.base.errors import InternalError, ServeError
from twostroke.base.fault_points import Point, reach

log = logging.getLogger(__name__)

ROOM_S = 60.0
"""Seconds after which a worker that Ray has no node for is not waited for: a reload continues with the others."""

RETURNED = InternalError("run() returned although nobody asked the worker to shut down")


class WorkerEpochs:
    def __init__(self, parts: FleetParts, begun: Sequence[Callable[[str], Coroutine[None, None, None]]]) -> None:
        """Each of `begun` is run for each worker that begins to serve."""
        self._parts = parts
        self._begun = begun
        self._is_stopped = False

    def create(self, worker_id: str) -> None:
        """Finds the worker's process, or creates it, unless it was told to leave."""
        reach(Point.SUPERVISOR_CREATING)
        config = self._parts.fleet.worker(worker_id).config
        found = self._parts.backend.find(config)
        if found is not None:
            log.info("worker found worker=%s", worker_id)
        elif self._parts.drains.ended(worker_id):
            self._parts.fleet.enter(worker_id, WorkerStage.DRAINED)
            return
        self._parts.fleet.set_process(worker_id, found or self._parts.backend.create(config))
        self._parts.fleet.enter(worker_id, WorkerStage.IDLE)

    def start(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        """Begins the next epoch in a task of `tasks`."""
        self._parts.fleet.enter(worker_id, WorkerStage.STARTING)
        tasks.create_task(self._run(worker_id, tasks))

    def stop(self) -> None:
        """Takes no end of an epoch for a failure from now on."""
        self._is_stopped = True

    async def _run(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        """Runs one epoch of one worker, from before `run()` is called until it has ended."""
        handle = self._parts.fleet.handle(worker_id)
        readiness: asyncio.Task[None] | None = None
        try:
            place = await self._placed(worker_id, handle)
            self._parts.fleet.locate(worker_id, place)
            if place.is_idle and self._parts.desired.shall_sleep(worker_id):
                await handle.release()
                self._parts.drains.ended(worker_id)  # an earlier process of the supervisor may have begun it
                self._parts.fleet.enter(worker_id, WorkerStage.ASLEEP)
                return
            incarnation, role = self._parts.backend.next_incarnation(worker_id), self._parts.desired.role(worker_id)
            reach(Point.SUPERVISOR_STARTING)
            log.info("worker starts worker=%s role=%s incarnation=%d", worker_id, role, incarnation)
            readiness = asyncio.create_task(self._announce_when_ready(worker_id, incarnation, handle, tasks))
            await handle.run(incarnation, role, self._parts.desired.state.weights.wanted)
            ending: ServeError = RETURNED
        except ServeError as error:
            ending = error
        finally:
            if readiness is not None:
                readiness.cancel()
        if not self._is_stopped:
            self._end(worker_id, ending)

    async def _placed(self, worker_id: str, handle: WorkerHandle) -> ActorLocation:
        """Returns where the worker's process is, once there is one."""
        waits = asyncio.get_running_loop().call_later(ROOM_S, self._parts.fleet.lack_room, worker_id)
        try:
            return await place_of(worker_id, handle)
        finally:
            waits.cancel()
            self._parts.fleet.have_room(worker_id)

    async def _announce_when_ready(
        self, worker_id: str, incarnation: int, handle: WorkerHandle, tasks: asyncio.TaskGroup
    ) -> None:
        try:
            serving = await handle.ready(incarnation)
        except ServeError as error:
            # run() ends too; its error says what happened.
            log.info("worker will not be ready worker=%s error=%s", worker_id, error)
            return
        reach(Point.SUPERVISOR_ANNOUNCING)
        log.info("worker serves worker=%s address=%s epoch=%s", worker_id, serving.address, serving.epoch)
        self._parts.fleet.serve(worker_id, serving)
        self._parts.drains.resume(worker_id, tasks, shall_switch=self._parts.desired.shall_switch(worker_id))
        for begun in self._begun:
            tasks.create_task(begun(worker_id))
        await recycle_when_frozen(worker_id, handle)

    def _end(self, worker_id: str, ending: ServeError) -> None:
        reach(Point.SUPERVISOR_WORKER_ENDED)
        before = self._parts.fleet.stage(worker_id)
        observed = self._parts.fleet.end(worker_id, ending)
        if before is WorkerStage.STARTING or observed.crashes >= CRASHES_TO_GIVE_UP:
            self._parts.reloads.could_not_serve(worker_id, ending, observed.crashes)
        self._prepare_next(worker_id, before, observed, ending)

    def _prepare_next(self, worker_id: str, before: WorkerStage, observed: Observed, ending: ServeError) -> None:
        """Lets the process of an ended epoch go, sleep, or make room for the next epoch."""
        switches = self._parts.drains.switches(worker_id) and ending is RETURNED
        if observed.stage is WorkerStage.FAILED:
            log.error("worker cannot start worker=%s error=%s", worker_id, ending)
            self._parts.fleet.remove_process(worker_id)  # others may use its place
            return
        if self._parts.drains.sleeps(worker_id) and ending is RETURNED:
            log.info("worker falls asleep worker=%s", worker_id)
            self._parts.fleet.enter(worker_id, WorkerStage.ASLEEP)
            return
        if self._parts.drains.ended(worker_id):
            log.info("worker has left worker=%s", worker_id)
            self._parts.fleet.remove_process(worker_id)
            self._parts.fleet.enter(worker_id, WorkerStage.DRAINED)
            return
        if before is WorkerStage.DRAINING:
            log.info("worker ended as asked worker=%s", worker_id)
        else:
            log.warning(
                "worker died worker=%s error=%s crashes=%d restart_in_s=%.1f",
                *(worker_id, ending, observed.crashes, backoff_s(observed.crashes)),
            )
        if not switches and not isinstance(ending, WorkerDied):
            self._parts.fleet.handle(worker_id).recycle()
