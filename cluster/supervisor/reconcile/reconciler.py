"""Changes the fleet until it matches the desired state. One decode worker always stays.

Every pass starts from the desired state and from what is observed, never from what was done last. So a restarted
supervisor continues in the middle of a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from cluster.supervisor.backend import AfterDrain
from cluster.supervisor.reconcile.drains import DEADLINE_S, SWITCH_S
from cluster.supervisor.reconcile.parts import FleetParts
from cluster.supervisor.reconcile.plan import GONE, WorkerStage
from cluster.values.desired_state import Slot
from twostroke.base.errors import NotFound, PeerLost
from twostroke.config import Role

log = logging.getLogger(__name__)

FOUND_WORKER_S = 5.0
"""Seconds for a process that was found to report that it serves. A process that starts takes longer."""


class Reconciler:
    def __init__(self, parts: FleetParts) -> None:
        self._parts = parts
        self._sleep_s: dict[str, float] = {}
        """Seconds that requests have on a worker that is to sleep, by worker."""
        self._switches = 0

    @property
    def switches(self) -> int:
        """Switches of role since the supervisor started."""
        return self._switches

    def set_time_to_sleep(self, worker_id: str, seconds: float) -> None:
        """Sets how long requests have on a worker once it is to sleep."""
        self._sleep_s[worker_id] = seconds

    def look(self, tasks: asyncio.TaskGroup) -> None:
        """Begins every change that can begin now."""
        self._parts.desired.request_nodes_again()
        self._parts.reloads.look(tasks)
        for worker_id, slot in self._parts.desired.state.slots.items():
            try:
                stage = self._parts.fleet.stage(worker_id)
            except NotFound:
                self._parts.fleet.add(self._parts.desired.config(worker_id))
                continue
            at_rest = stage in (WorkerStage.SERVING, WorkerStage.ASLEEP)
            if worker_id not in self._parts.changes.busy and not (at_rest and self._parts.drains.lingers(worker_id)):
                self._look_at(worker_id, slot, stage, tasks)

    def _look_at(self, worker_id: str, slot: Slot, stage: WorkerStage, tasks: asyncio.TaskGroup) -> None:
        """Begins what brings one worker to its slot, if that can begin now."""
        serves, begin = stage is WorkerStage.SERVING, self._parts.changes.begin
        if slot.is_retiring:
            if stage is WorkerStage.ABSENT:  # its process may still be found
                self._parts.backend.set_after_drain(worker_id, AfterDrain.REMOVE)
            elif not serves or self._can_be_spared(worker_id):
                begin(worker_id, self._retire(worker_id, tasks), tasks)
        elif slot.is_asleep:
            if serves:
                begin(worker_id, self._fall_asleep(worker_id, tasks), tasks)
        elif stage is WorkerStage.ASLEEP:
            self._parts.fleet.enter(worker_id, WorkerStage.IDLE)
        elif serves and self._parts.desired.shall_switch(worker_id) and self._can_be_spared(worker_id):
            begin(worker_id, self._switch(worker_id, tasks), tasks)

    def _can_be_spared(self, worker_id: str) -> bool:
        """Returns whether the fleet can serve without the worker: only decode workers generate."""
        if self._parts.fleet.worker(worker_id).role is Role.PREFILL:
            return True
        return self._parts.desired.others_take_requests(worker_id, Role.DECODE, self._parts.changes.busy)

    async def _fall_asleep(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._parts.drains.put_to_sleep(worker_id, self._sleep_s.get(worker_id, DEADLINE_S), tasks)
        except PeerLost as error:
            log.warning("worker does not sleep yet worker=%s error=%s", worker_id, error)

    async def _retire(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        """Lets a worker leave for good. If somebody asks it back meanwhile, the next pass begins anew."""
        if self._parts.fleet.stage(worker_id) in (WorkerStage.SERVING, WorkerStage.DRAINING, WorkerStage.DRAINED):
            try:
                await self._parts.drains.drain(worker_id, DEADLINE_S, False, tasks)
            except PeerLost as error:
                log.warning("worker does not retire yet worker=%s error=%s", worker_id, error)
                return
        else:
            await self._end_unserved(worker_id)
        await self._parts.drains.until_over(worker_id)
        if self._parts.fleet.stage(worker_id) not in GONE:
            return
        self._parts.backend.set_after_drain(worker_id, None)
        self._parts.fleet.forget(worker_id)
        self._parts.desired.write(self._parts.desired.state.without(worker_id))
        log.info("worker has retired worker=%s", worker_id)

    async def _end_unserved(self, worker_id: str) -> None:
        """Ends a worker that does not serve. A process that was found may turn out to serve; then it drains."""
        fleet = self._parts.fleet
        self._parts.backend.set_after_drain(worker_id, AfterDrain.REMOVE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FOUND_WORKER_S):
                await fleet.until(worker_id, lambda stage: stage not in _BEGINNING)
        if fleet.stage(worker_id) is WorkerStage.DEAD:
            fleet.enter(worker_id, WorkerStage.DRAINED)
        elif fleet.stage(worker_id) in _BEGINNING:
            fleet.handle(worker_id).remove()
        await fleet.until(worker_id, lambda stage: stage in GONE or stage is WorkerStage.SERVING)

    async def _switch(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        self._switches += 1
        started_s = asyncio.get_running_loop().time()
        try:
            left = await self._parts.drains.switch(worker_id, SWITCH_S, tasks)
        except PeerLost as error:
            log.warning("worker does not switch yet worker=%s error=%s", worker_id, error)
            return
        seconds, role = asyncio.get_running_loop().time() - started_s, self._parts.desired.role(worker_id)
        log.info("switched worker=%s role=%s cut_off=%d seconds=%.2f", worker_id, role, left, seconds)


_BEGINNING = frozenset({WorkerStage.IDLE, WorkerStage.STARTING})
