"""Decides which worker is created or started now, which leaves its node, and when to look again. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from twostroke.config import Role

STABLE_S = 10.0
"""Seconds of serving after which a crash is not part of a crash loop."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_LEAVE_S = 30.0
"""Seconds for one worker to drain off a node that ends later, or at an unknown time."""
NEAR_S = 45.0
"""Seconds before a node's end when all its workers drain at once, as two drains in a row may not fit."""
SPARE_S = 2.0
"""Seconds between the end of a drain and the end of the node, for the process to end by itself."""


class WorkerStage(enum.StrEnum):
    ABSENT = "absent"
    """There is no actor."""
    IDLE = "idle"
    """There is an actor, created or found by a restarted supervisor, and `run` was not called."""
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """The worker finishes or hands over its requests; then its epoch ends."""
    ASLEEP = "asleep"
    """The worker has drained, and its process has no model and no pages until it is woken."""
    DRAINED = "drained"
    """The worker has left and has no actor until it is asked back."""
    DEAD = "dead"
    """The worker's epoch has ended; the next one begins at once or after a pause."""
    FAILED = "failed"
    """The worker cannot be started as configured; this is final."""


NEXT: dict[WorkerStage, frozenset[WorkerStage]] = {
    WorkerStage.ABSENT: frozenset({WorkerStage.IDLE, WorkerStage.DEAD, WorkerStage.DRAINED}),
    WorkerStage.IDLE: frozenset({WorkerStage.STARTING}),
    WorkerStage.STARTING: frozenset(
        {WorkerStage.SERVING, WorkerStage.DEAD, WorkerStage.FAILED, WorkerStage.ASLEEP}  # ASLEEP: found so
    ),
    WorkerStage.SERVING: frozenset({WorkerStage.DRAINING, WorkerStage.DEAD}),
    WorkerStage.DRAINING: frozenset({WorkerStage.DEAD}),
    WorkerStage.ASLEEP: frozenset({WorkerStage.IDLE, WorkerStage.DRAINED}),
    WorkerStage.DRAINED: frozenset({WorkerStage.ABSENT}),
    WorkerStage.DEAD: frozenset({WorkerStage.STARTING, WorkerStage.IDLE, WorkerStage.DRAINED, WorkerStage.ASLEEP}),
    WorkerStage.FAILED: frozenset(),
}

GONE = frozenset({WorkerStage.ASLEEP, WorkerStage.DRAINED, WorkerStage.FAILED})
"""Stages of a worker that will not serve by itself."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the supervisor knows of one worker."""

    worker_id: str
    stage: WorkerStage = WorkerStage.ABSENT
    since_s: float = 0.0
    """Time when the stage was entered."""
    crashes: int = 0
    """Epochs in a row that ended early."""
    has_served: bool = False
    crashed_s: float | None = None
    """Time when an epoch last ended early."""

    def enter(self, stage: WorkerStage, now_s: float) -> Observed:
        assert stage in NEXT[self.stage], f"{self.worker_id}: {self.stage} -> {stage}"
        return replace(self, stage=stage, since_s=now_s, has_served=self.has_served or stage is WorkerStage.SERVING)

    def end(self, now_s: float, *, misconfigured: bool) -> Observed:
        """Notes that the epoch has ended. A wrong configuration is final only for one that never served."""
        if self.stage is WorkerStage.DRAINING:  # it was asked to end
            return replace(self.enter(WorkerStage.DEAD, now_s), crashes=0)
        if misconfigured and not self.has_served and self.stage is WorkerStage.STARTING:
            return self.enter(WorkerStage.FAILED, now_s)
        was_stable = self.stage is WorkerStage.SERVING and now_s - self.since_s >= STABLE_S
        crashes = 1 if was_stable else self.crashes + 1
        return replace(self.enter(WorkerStage.DEAD, now_s), crashes=crashes, crashed_s=now_s)


@dataclass(frozen=True, slots=True)
class Create:
    worker_id: str


@dataclass(frozen=True, slots=True)
class Start:
    worker_id: str


Action = Create | Start


@dataclass(frozen=True, slots=True)
class Plan:
    actions: tuple[Action, ...] = ()
    wake_at_s: float | None = None
    """Time of the next look even if nothing happens; None means only when something happens."""


def backoff_s(crashes: int) -> float:
    """Returns the pause before the next epoch: none after a single crash, then doubling."""
    if crashes <= 1:
        return 0.0
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(crashes - 2, 16))


def plan(observed: Iterable[Observed], now_s: float) -> Plan:
    actions: list[Action] = []
    wakes_s: list[float] = []
    for worker in observed:
        if worker.stage is WorkerStage.ABSENT:
            actions.append(Create(worker.worker_id))
        elif worker.stage is WorkerStage.IDLE:
            actions.append(Start(worker.worker_id))
        elif worker.stage is WorkerStage.DEAD:
            due_s = worker.since_s + backoff_s(worker.crashes)
            if due_s <= now_s:
                actions.append(Start(worker.worker_id))
            else:
                wakes_s.append(due_s)
    return Plan(tuple(actions), min(wakes_s, default=None))


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A worker and the node of its process."""

    worker_id: str
    role: Role
    stage: WorkerStage
    node_id: str | None
    """None means that there is no process, or that its node is not known yet."""


@dataclass(frozen=True, slots=True)
class Leave:
    worker_id: str
    deadline_s: float
    """Deadline of the drain in seconds from now."""


def leaves(
    placed_workers: Iterable[PlacedWorker], leaving: Mapping[str, float], *, has_others: bool
) -> tuple[Leave, ...]:
    """Decides which workers begin to drain now. `leaving` holds the seconds left of each node that ends.

    One worker of a role drains at a time, while the others serve: the first one back proves that there is room
    elsewhere. All workers of a node drain at once where its end is near.
    """
    workers = list(placed_workers)
    unsettled = {worker.role for worker in workers if worker.stage in _UNSETTLED}
    result: list[Leave] = []
    for worker in workers:
        left_s = leaving.get(worker.node_id or "")
        if left_s is None or worker.stage is not WorkerStage.SERVING:
            continue
        if left_s > NEAR_S:
            if worker.role in unsettled or not has_others:
                continue
            unsettled.add(worker.role)
        result.append(Leave(worker.worker_id, min(LONGEST_LEAVE_S, max(0.0, left_s - SPARE_S))))
    return tuple(result)


_UNSETTLED = frozenset(
    {WorkerStage.ABSENT, WorkerStage.IDLE, WorkerStage.STARTING, WorkerStage.DRAINING, WorkerStage.DEAD}
)
"""Stages of a worker that does not serve yet and will."""
