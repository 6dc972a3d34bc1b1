"""The stages of a request on a decode worker, and the one door between them."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    PULLING = "pulling"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


NEXT: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.RESERVED, Stage.FAILED}),
    Stage.RESERVED: frozenset({Stage.PULLING, Stage.RUNNING, Stage.FAILED}),  # RUNNING: nothing to pull
    Stage.PULLING: frozenset({Stage.RUNNING, Stage.WAITING, Stage.FAILED}),  # WAITING: preempted
    Stage.RUNNING: frozenset({Stage.DONE, Stage.WAITING, Stage.FAILED}),  # WAITING: preempted
    Stage.DONE: frozenset(),
    Stage.FAILED: frozenset(),
}

FINAL = frozenset({Stage.DONE, Stage.FAILED})
