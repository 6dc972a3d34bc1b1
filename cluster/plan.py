"""Which worker is created or started now, which leaves its node, and when to look again. Pure: no clock, no Ray."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from twostroke.config import Role

STABLE_S = 10.0
"""A life that served this long was not part of a crash loop."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_LEAVE_S = 30.0
"""For one worker to drain off a node that leaves later, or nobody knows when."""
NEAR_S = 45.0
"""A node that ends this soon is left by everybody at once: one drain and its end fit in, two in a row may not."""
SPARE_S = 2.0
"""Between the end of a drain and that of the node: for the process to end by itself."""


class Stage(enum.StrEnum):
    ABSENT = "absent"
    """No actor."""
    IDLE = "idle"
    """An actor without a life: created, or found by a restarted supervisor."""
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """It finishes or hands over what it has; then its life ends."""
    DRAINED = "drained"
    """It has left, and stays away until it is asked back: no actor."""
    DEAD = "dead"
    """Its last life has ended; the next one is due at once or after a pause."""
    FAILED = "failed"
    """It cannot be started as configured; final."""


NEXT: dict[Stage, frozenset[Stage]] = {
    Stage.ABSENT: frozenset({Stage.IDLE, Stage.DEAD, Stage.DRAINED}),
    Stage.IDLE: frozenset({Stage.STARTING}),
    Stage.STARTING: frozenset({Stage.SERVING, Stage.DEAD, Stage.FAILED}),
    Stage.SERVING: frozenset({Stage.DRAINING, Stage.DEAD}),
    Stage.DRAINING: frozenset({Stage.DEAD}),
    Stage.DRAINED: frozenset({Stage.ABSENT}),
    Stage.DEAD: frozenset({Stage.STARTING, Stage.IDLE, Stage.DRAINED}),
    Stage.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Observed:
    """What the supervisor knows of one worker."""

    worker_id: str
    stage: Stage = Stage.ABSENT
    since_s: float = 0.0
    """When the stage was entered."""
    crashes: int = 0
    """Lives in a row that ended young."""
    has_served: bool = False

    def enter(self, stage: Stage, now_s: float) -> Observed:
        assert stage in NEXT[self.stage], f"{self.worker_id}: {self.stage} -> {stage}"
        return replace(self, stage=stage, since_s=now_s, has_served=self.has_served or stage is Stage.SERVING)

    def end(self, now_s: float, *, misconfigured: bool) -> Observed:
        """The life has ended. A wrong configuration is final only for a worker that never served with it."""
        if self.stage is Stage.DRAINING:  # as it was asked to
            return replace(self.enter(Stage.DEAD, now_s), crashes=0)
        if misconfigured and not self.has_served and self.stage is Stage.STARTING:
            return self.enter(Stage.FAILED, now_s)
        was_stable = self.stage is Stage.SERVING and now_s - self.since_s >= STABLE_S
        return replace(self.enter(Stage.DEAD, now_s), crashes=1 if was_stable else self.crashes + 1)


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
    """Look again then, even if nothing happens; None: only when something happens."""


def backoff_s(crashes: int) -> float:
    """Pause before the next life: none after a single crash, then doubling."""
    if crashes <= 1:
        return 0.0
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(crashes - 2, 16))


def plan(observed: Iterable[Observed], now_s: float) -> Plan:
    actions: list[Action] = []
    wakes_s: list[float] = []
    for worker in observed:
        if worker.stage is Stage.ABSENT:
            actions.append(Create(worker.worker_id))
        elif worker.stage is Stage.IDLE:
            actions.append(Start(worker.worker_id))
        elif worker.stage is Stage.DEAD:
            due_s = worker.since_s + backoff_s(worker.crashes)
            if due_s <= now_s:
                actions.append(Start(worker.worker_id))
            else:
                wakes_s.append(due_s)
    return Plan(tuple(actions), min(wakes_s, default=None))


@dataclass(frozen=True, slots=True)
class Resident:
    """A worker, and the node that its process is on."""

    worker_id: str
    role: Role
    stage: Stage
    node_id: str | None
    """None: no process, or not known yet."""


@dataclass(frozen=True, slots=True)
class Leave:
    worker_id: str
    deadline_s: float
    """From now."""


def leaves(residents: Iterable[Resident], leaving: Mapping[str, float], *, has_others: bool) -> tuple[Leave, ...]:
    """Who begins to drain now, with `leaving` as the seconds that each node has that shall be left.

    One of a role at a time, while the others of it serve: whoever comes back first proves that there is room elsewhere.
    Where a node's end is near, all that it has at once.
    """
    workers = list(residents)
    unsettled = {worker.role for worker in workers if worker.stage in _UNSETTLED}
    result: list[Leave] = []
    for worker in workers:
        left_s = leaving.get(worker.node_id or "")
        if left_s is None or worker.stage is not Stage.SERVING:
            continue
        if left_s > NEAR_S:
            if worker.role in unsettled or not has_others:
                continue
            unsettled.add(worker.role)
        result.append(Leave(worker.worker_id, min(LONGEST_LEAVE_S, max(0.0, left_s - SPARE_S))))
    return tuple(result)


_UNSETTLED = frozenset({Stage.ABSENT, Stage.IDLE, Stage.STARTING, Stage.DRAINING, Stage.DEAD})
"""It does not serve, and will."""
