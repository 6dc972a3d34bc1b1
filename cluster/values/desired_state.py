"""Holds the workers that the fleet should have, each with its role.

It is stored as one value, so no restart sees half a change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.values.worker_counts import WorkerCounts
from twostroke.config import Role, WorkerConfig


@dataclass(frozen=True, slots=True)
class Slot:
    """The desired role of one worker."""

    role: Role
    is_retiring: bool = False
    """Whether it drains and leaves for good; its slot is removed when it has left."""
    is_asleep: bool = False
    """Whether it drains, and its process stays without model and pages until it is woken."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights that an epoch begins with."""

    model: str = ""
    """Model, named as in --model; empty: the model that the fleet was started with."""
    number: int = 0
    """Reloads of the fleet up to this one: the same directory may hold other weights later."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a fleet. The two differ while its workers change from one checkpoint to another."""

    wanted: Checkpoint = Checkpoint()
    """What every epoch begins with from now on."""
    routed: Checkpoint = Checkpoint()
    """What the workers have that new requests go to."""
    before: Checkpoint = Checkpoint()
    """What requests went to before the latest reload."""
    latest: int = 0
    """Number of the latest reload, also if it was given up: no two reloads have the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    fleet: str
    """Identity of the fleet. State that an earlier fleet has left behind is ignored."""
    slots: dict[str, Slot]
    """Slots by worker id. A worker keeps its id when it switches role."""
    is_automatic: bool
    """Whether the planner sets the counts. Otherwise operators do."""
    reason: str = ""
    """Reason of the last change, for operators."""
    weights: Weights = Weights()

    @classmethod
    def of(cls, fleet: str, workers: Iterable[WorkerConfig], *, is_automatic: bool) -> DesiredState:
        return cls(fleet=fleet, slots={each.worker_id: Slot(each.role) for each in workers}, is_automatic=is_automatic)

    def workers(self, role: Role, gone: Collection[str] = ()) -> list[str]:
        """Returns the workers that should stay in this role, without those in `gone`."""
        return [name for name in self._staying(gone) if self.slots[name].role is role]

    def placed(self, role: Role, gone: Collection[str] = ()) -> int:
        """Counts the workers that stay on nodes chosen for this role. A switch of role does not move a worker."""
        return sum(placed_as(name) is role for name in self._staying(gone))

    def _staying(self, gone: Collection[str]) -> list[str]:
        return [name for name, slot in self.slots.items() if not slot.is_retiring and name not in gone]

    def with_slot(self, worker_id: str, slot: Slot) -> DesiredState:
        return replace(self, slots={**self.slots, worker_id: slot})

    def without(self, worker_id: str) -> DesiredState:
        return replace(self, slots={name: slot for name, slot in self.slots.items() if name != worker_id})

    def new_name(self, role: Role) -> str:
        """Returns the first unused name."""
        return next(name for number in range(len(self.slots) + 1) if (name := f"{role}-{number}") not in self.slots)


def placed_as(worker_id: str) -> Role:
    """Returns the role in which a worker was created; its name begins with it."""
    return Role(worker_id.rpartition("-")[0])


def counts_of(desired: DesiredState, gone: Collection[str] = ()) -> WorkerCounts:
    """Counts the workers that should serve. Those in `gone` have left or cannot start and do not count."""
    return WorkerCounts(len(desired.workers(Role.PREFILL, gone)), len(desired.workers(Role.DECODE, gone)))


def revised(
    desired: DesiredState,
    wanted: WorkerCounts,
    held: Mapping[str, int],
    gone: Collection[str] = (),
    *,
    may_switch: bool,
) -> DesiredState:
    """Returns the desired state with the wanted number of workers of each role.

    A serving worker that one role can spare switches to a role that lacks one. A switch takes a second; a new worker
    takes many. Workers that are not in `held` do not serve and leave first; then those with the fewest blocks, the
    youngest first among equals. Workers in `gone` are left as they are.
    """
    now = counts_of(desired, gone)
    lacking = {Role.PREFILL: wanted.prefill - now.prefill, Role.DECODE: wanted.decode - now.decode}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if may_switch and lacking[role] > 0 and lacking[other] < 0:
            in_order = sorted(
                _in_leaving_order(desired.workers(other, gone), held), key=lambda worker_id: worker_id not in held
            )
            switching = in_order[: min(lacking[role], -lacking[other])]
            for worker_id in switching:
                desired = desired.with_slot(worker_id, Slot(role))
            lacking[role] -= len(switching)
            lacking[other] += len(switching)
    for role, count in lacking.items():
        for worker_id in _in_leaving_order(desired.workers(role, gone), held)[: max(0, -count)]:
            desired = desired.with_slot(worker_id, Slot(role, is_retiring=True))
        for _ in range(count):
            desired = desired.with_slot(desired.new_name(role), Slot(role))
    return desired


def _in_leaving_order(workers: Sequence[str], held: Mapping[str, int]) -> list[str]:
    youngest_first = list(reversed(workers))
    return sorted(youngest_first, key=lambda worker_id: (worker_id in held, held.get(worker_id, 0)))
