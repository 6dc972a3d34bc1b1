"""Owns the desired state: how many workers there should be, in which role and with which weights.

Each change is stored before anybody is told.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from cluster.supervisor.backend import FleetBackend
from cluster.supervisor.fleet import SupervisedFleet
from cluster.supervisor.reconcile.plan import GONE, WorkerStage
from cluster.supervisor.reconcile.weights import LoadedWorker
from cluster.values.desired_state import Checkpoint, DesiredState, Slot, counts_of, revised
from cluster.values.spec import FleetSpec
from cluster.values.worker_counts import WorkerCounts
from twostroke.base.errors import NotFound
from twostroke.config import Role, WorkerConfig

log = logging.getLogger(__name__)

ROLES = (Role.PREFILL, Role.DECODE)


class DesiredFleet:
    def __init__(self, fleet: SupervisedFleet, backend: FleetBackend, spec: FleetSpec) -> None:
        self._fleet = fleet
        self._backend = backend
        self._spec = spec
        self._requested: WorkerCounts | None = None
        """Workers that nodes were last requested for; None before any request."""
        self._changes = 0
        written = backend.desired()
        if written is not None and written.fleet == spec.identity:
            self._state = written
        else:
            self._state = DesiredState.of(spec.identity, spec.workers, is_automatic=spec.scales)

    @property
    def state(self) -> DesiredState:
        return self._state

    @property
    def changes(self) -> int:
        """Changes of the desired workers since the supervisor started."""
        return self._changes

    def config(self, worker_id: str) -> WorkerConfig:
        return self._spec.worker(worker_id, self._state.slots[worker_id].role)

    def slot(self, worker_id: str) -> Slot:
        """Raises NotFound where there is no such worker, or it leaves for good."""
        slot = self._state.slots.get(worker_id)
        if slot is None or slot.is_retiring:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(self._state.slots)}")
        return slot

    def role(self, worker_id: str) -> Role:
        """Returns the role in which the worker should serve."""
        return self._state.slots[worker_id].role

    def shall_switch(self, worker_id: str) -> bool:
        """Returns whether the worker serves in another role than it should."""
        return self._fleet.worker(worker_id).role is not self.role(worker_id)

    def shall_sleep(self, worker_id: str) -> bool:
        return self._state.slots[worker_id].is_asleep

    # What is desired beside what is observed

    def stage(self, worker_id: str) -> WorkerStage:
        """Returns the stage of a worker that may be desired and not created yet."""
        try:
            return self._fleet.stage(worker_id)
        except NotFound:
            return WorkerStage.ABSENT

    @property
    def wanted(self) -> WorkerCounts:
        """Workers that should serve. A worker that was drained or cannot start counts again once it is asked back."""
        return counts_of(self._state, self._gone())

    def startable(self, wanted: WorkerCounts) -> WorkerCounts:
        """Limits what a planner asks for: where one worker of a role cannot start, more would not either.

        A worker that an operator has put to sleep is not replaced.
        """
        changes = list(zip(ROLES, self.wanted.pair, wanted.pair, strict=True))
        if any(then > now and self._failed(role) for role, now, then in changes):
            return self.wanted
        return WorkerCounts(*(max(min(now, then), then - self._asleep(role)) for role, now, then in changes))

    def loaded(self, busy: Collection[str]) -> list[LoadedWorker]:
        """Returns the workers that serve or will by themselves. Those in `busy` begin anew or leave now."""
        gone = self._gone()
        return [
            LoadedWorker(name, slot.role, self._checkpoint(name, busy), self._fleet.has_no_room(name))
            for name, slot in self._staying().items()
            if name not in gone
        ]

    def others_take_requests(self, worker_id: str, role: Role, busy: Collection[str]) -> bool:
        """Returns whether another worker of this role stays and takes new requests, with the weights that they need."""
        return any(
            self._checkpoint(name, busy) == self._state.weights.routed and self._fleet.worker(name).role is role
            for name in self._staying()
            if name != worker_id
        )

    def _staying(self) -> dict[str, Slot]:
        return {name: each for name, each in self._state.slots.items() if not each.is_retiring and not each.is_asleep}

    def _checkpoint(self, worker_id: str, busy: Collection[str]) -> Checkpoint | None:
        """Returns the weights that a worker serves with and continues serving with; None where it does not."""
        try:
            return None if worker_id in busy else self._fleet.checkpoint(worker_id)
        except NotFound:
            return None

    def _gone(self) -> frozenset[str]:
        return frozenset(name for name in self._state.slots if self.stage(name) in GONE)

    def _asleep(self, role: Role) -> int:
        return sum(self._state.slots[name].is_asleep for name in self._state.workers(role))

    def _failed(self, role: Role) -> list[str]:
        return [name for name in self._state.workers(role) if self.stage(name) is WorkerStage.FAILED]

    # Changes

    def write(self, state: DesiredState) -> None:
        if state != self._state:
            self._backend.set_desired(state)
            self._state = state
            self._fleet.publish()

    def set_automatic(self, *, is_automatic: bool) -> None:
        self.write(replace(self._state, is_automatic=is_automatic))

    def scale(self, wanted: WorkerCounts, held: Mapping[str, int], *, is_automatic: bool, reason: str) -> None:
        """Sets how many workers there should be from now on."""
        self._forget_failed(wanted)
        state = revised(self._state, wanted, held, self._gone(), may_switch=self._spec.flexible)
        if state.slots != self._state.slots:
            self._changes += 1
            log.info("scaling before=%s wanted=%s reason=%s", self.wanted, wanted, reason)
        self.write(replace(state, is_automatic=is_automatic, reason=reason))
        self._request_nodes()

    def request_nodes_again(self) -> None:
        """Requests nodes for other counts of workers than before, once that was done at all."""
        if self._requested not in (None, self._placed()):
            self._request_nodes()

    def _request_nodes(self) -> None:
        self._requested = self._placed()
        self._backend.request_nodes(self._requested)

    def _placed(self) -> WorkerCounts:
        gone = self._gone()
        return WorkerCounts(*(self._state.placed(role, gone) for role in ROLES))

    def _forget_failed(self, wanted: WorkerCounts) -> None:
        """Removes workers that could not start where more of their role are wanted: their names can be used again."""
        for role, now, then in zip(ROLES, self.wanted.pair, wanted.pair, strict=True):
            for name in self._failed(role) if then > now else ():
                self._fleet.forget(name)
                self._state = self._state.without(name)
