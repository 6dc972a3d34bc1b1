"""Carries out what operators ask of one worker: it changes the desired state and waits until the fleet matches it."""

from __future__ import annotations

from dataclasses import replace

from cluster.supervisor.reconcile.parts import FleetParts
from cluster.supervisor.reconcile.plan import GONE, WorkerStage
from cluster.supervisor.reconcile.reconciler import Reconciler
from cluster.values.desired_state import Slot
from twostroke.base.errors import ConfigError, InvalidRequest, PeerLost
from twostroke.config import Role


class WorkerCommands:
    def __init__(self, parts: FleetParts, reconciler: Reconciler) -> None:
        self._parts = parts
        self._reconciler = reconciler

    def check_may_leave(self, worker_id: str) -> None:
        """Raises InvalidRequest where no other worker of its role serves, NotFound where there is no such worker."""
        worker = self._parts.fleet.worker(worker_id)
        if worker.observed.stage is not WorkerStage.SERVING:
            return
        if not self._parts.desired.others_take_requests(worker_id, worker.role, self._parts.changes.busy):
            raise InvalidRequest(
                f"{worker_id} is the last {worker.role} worker that serves: add one first (twostroke scale), or pass "
                "--force",
                field="--force",
            )

    def check_may_restart(self, worker_id: str) -> None:
        """Raises PeerLost where another command makes workers begin anew or sleep, InvalidRequest for a sleeping one.

        Two that go at once may be all that a role has.
        """
        if self._parts.reloads.is_running:
            raise PeerLost(
                "the fleet is loading other weights, for which every worker begins anew: try again when it has them"
            )
        if self._parts.desired.stage(worker_id) is WorkerStage.ASLEEP:
            raise InvalidRequest(f"{worker_id} sleeps: it begins anew with: twostroke wake {worker_id}", field="worker")
        on_its_way = (WorkerStage.SERVING, WorkerStage.DRAINING)
        for name, slot in self._parts.desired.state.slots.items():
            if slot.is_asleep and self._parts.desired.stage(name) in on_its_way:
                raise PeerLost(f"{name} is falling asleep: try again when it is")

    async def assign(self, worker_id: str, role: Role) -> None:
        """Returns when the worker serves in this role. Raises NotFound, ConfigError, InvalidRequest or PeerLost."""
        desired = self._parts.desired
        if role is not desired.slot(worker_id).role:
            self._check_may_become(worker_id, role)
            state = desired.state.with_slot(worker_id, Slot(role))
            desired.write(replace(state, is_automatic=False, reason=f"{worker_id} was told to {role}"))
        await self._until_serves(worker_id, Slot(role))

    async def put_to_sleep(self, worker_id: str, deadline_s: float) -> None:
        """Returns when the worker sleeps. Raises NotFound, InvalidRequest or PeerLost."""
        desired = self._parts.desired
        slot = replace(desired.slot(worker_id), is_asleep=True)
        if (stage := desired.stage(worker_id)) not in (WorkerStage.SERVING, WorkerStage.ASLEEP):
            raise PeerLost(f"{worker_id} is {stage}: only a worker that serves can sleep")
        self._reconciler.set_time_to_sleep(worker_id, deadline_s)
        desired.write(replace(desired.state.with_slot(worker_id, slot), reason=f"{worker_id} was told to sleep"))
        await self._until_stage(worker_id, slot, WorkerStage.ASLEEP)
        await self._parts.drains.until_over(worker_id)

    async def wake_up(self, worker_id: str) -> None:
        """Returns when the worker serves. Raises NotFound, InvalidRequest or PeerLost."""
        desired = self._parts.desired
        slot = desired.slot(worker_id)
        if not slot.is_asleep:
            raise InvalidRequest(f"{worker_id} is not asleep: it is {desired.stage(worker_id)}", field="worker")
        slot = replace(slot, is_asleep=False)
        desired.write(replace(desired.state.with_slot(worker_id, slot), reason=f"{worker_id} was woken"))
        await self._until_stage(worker_id, slot, WorkerStage.SERVING)

    def _check_may_become(self, worker_id: str, role: Role) -> None:
        desired = self._parts.desired
        if not self._parts.spec.flexible:
            raise ConfigError(
                "workers of this fleet keep their roles: start it with --flexible, or with room between --min-* and "
                "--max-* of both roles",
                field="--flexible",
            )
        if (stage := desired.stage(worker_id)) in GONE:
            raise PeerLost(f"{worker_id} is {stage}: only a worker that serves can switch")
        others = (name for name in desired.state.workers(Role.DECODE) if name != worker_id)
        if role is Role.PREFILL and all(desired.stage(name) in GONE for name in others):
            raise InvalidRequest(f"{worker_id} is the last decode worker: add one first", field="worker")

    async def _until_serves(self, worker_id: str, slot: Slot) -> None:
        def is_settled(stage: WorkerStage) -> bool:
            serves = stage is WorkerStage.SERVING and self._parts.fleet.worker(worker_id).role is slot.role
            return serves or stage in GONE or self._parts.desired.state.slots[worker_id] != slot

        await self._parts.fleet.until(worker_id, is_settled)
        if self._parts.desired.state.slots[worker_id] != slot:
            raise InvalidRequest(f"another command has changed {worker_id} meanwhile", field="worker")
        if (stage := self._parts.desired.stage(worker_id)) in GONE:
            raise PeerLost(f"{worker_id} is {stage}: it serves in no role")

    async def _until_stage(self, worker_id: str, slot: Slot, wanted: WorkerStage) -> None:
        """Returns when the worker is in this stage; raises where another command or a failure prevents it."""
        while (stage := self._parts.desired.stage(worker_id)) is not wanted:
            if self._parts.desired.state.slots.get(worker_id) != slot:
                raise InvalidRequest(f"another command has changed {worker_id} meanwhile", field="worker")
            if stage in (WorkerStage.FAILED, WorkerStage.DRAINED):
                raise PeerLost(f"{worker_id} is {stage}")
            await self._parts.fleet.changed.wait()
