"""Workers that compute on the cores of one host, in virtual time: which step runs on which cores, and how fast.

Each worker owns a core. A step has its owner's core at once. If it wants to borrow, it also has those of workers that
have been idle for a while. Owners take them back when they begin a step (`twostroke.kernels.cpu.team`). Whether a step
wants to borrow, when it begins, and what it computes, is decided by the live objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.simulate.fleet.event_queue import EventQueue, QueuedEvent
from tools.simulate.fleet.shape import CoreSpeeds
from twostroke.kernels.cpu.team import BORROW_AFTER_US
from twostroke.scheduler.lateness import WaitingPrompts

BORROW_AFTER_S = BORROW_AFTER_US / 1e6
DONE_S = 1e-9
"""Seconds left below which a step is done: sums of times are rounded."""


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step under way: seconds that it still takes, with one thread on an idle host, for each of its parts."""

    parts: list[tuple[float, CoreSpeeds]]
    wants_borrowed: bool
    done: Callable[[], None]
    most_borrowed: int = 0
    """Cores that it borrowed at once at most."""

    @property
    def left_s(self) -> float:
        return sum(seconds for seconds, _ in self.parts)

    def pace(self, borrowed: int, is_beside: bool) -> float:
        """Returns the seconds of real time that a second of its work takes now."""
        left_s = self.left_s
        takes_s = sum(seconds * _times(speeds, borrowed, is_beside) for seconds, speeds in self.parts)
        return takes_s / left_s if left_s else 1.0

    def advance(self, seconds: float) -> None:
        left_s = self.left_s
        share = max(0.0, 1 - seconds / left_s) if left_s else 0.0
        self.parts = [(part_s * share, speeds) for part_s, speeds in self.parts]


@dataclass(slots=True, eq=False)
class WorkerCore:
    """One worker's core, and what it says to the others."""

    idle_since_s: float
    step: RunningStep | None = None
    prompts: WaitingPrompts = field(default_factory=WaitingPrompts)

    def is_idle_at(self, now_s: float) -> bool:
        return self.step is None and now_s >= self.idle_since_s + BORROW_AFTER_S - DONE_S


class HostCores:
    """All cores of the host; steps are brought up to date whenever one of them changes hands."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._cores: list[WorkerCore] = []
        self._at_s = queue.now_s
        """When the running steps were last brought up to date."""
        self._next: QueuedEvent | None = None

    def join(self) -> WorkerCore:
        core = WorkerCore(idle_since_s=self._queue.now_s)
        self._cores.append(core)
        return core

    def leave(self, core: WorkerCore) -> None:
        """Removes a worker that has died."""
        self._advance()
        self._cores.remove(core)
        self._look_ahead()

    def begin(self, core: WorkerCore, step: RunningStep) -> None:
        assert core.step is None, "a step is under way"
        self._advance()
        core.step = step
        self._look_ahead()

    def lend(self, core: WorkerCore) -> None:
        """Others may have this idle core at once."""
        self._advance()
        core.idle_since_s = -math.inf
        self._look_ahead()

    def prompts_beside(self, core: WorkerCore) -> WaitingPrompts:
        return WaitingPrompts.all_of(each.prompts for each in self._cores if each is not core)

    def _advance(self) -> None:
        """Lets all steps run until now."""
        passed_s, self._at_s = self._queue.now_s - self._at_s, self._queue.now_s
        if passed_s <= 0:
            return
        for step, pace in self._paces(self._at_s - passed_s):
            step.advance(passed_s / pace)

    def _paces(self, since_s: float) -> list[tuple[RunningStep, float]]:
        """Returns each step with its pace from `since_s` on; the first that wants it has a core that idles."""
        idle = sum(core.is_idle_at(since_s) for core in self._cores)
        running = [core.step for core in self._cores if core.step is not None]
        paces = []
        for step in running:
            borrowed = idle if step.wants_borrowed else 0
            idle -= borrowed
            step.most_borrowed = max(step.most_borrowed, borrowed)
            paces.append((step, step.pace(borrowed, len(running) > 1)))
        return paces

    def _look_ahead(self) -> None:
        """Waits for the next step's end, or the next core that has idled for long enough."""
        now_s = self._queue.now_s
        if self._next is not None:
            self._next.cancel()
        ends = [now_s + step.left_s * pace for step, pace in self._paces(now_s)]
        if not ends:
            return
        lent = [
            core.idle_since_s + BORROW_AFTER_S
            for core in self._cores
            if core.step is None and not core.is_idle_at(now_s)
        ]
        self._next = self._queue.at(min(ends + lent), self._change)

    def _change(self) -> None:
        self._advance()
        ended = [core for core in self._cores if core.step is not None and core.step.left_s <= DONE_S]
        for core in ended:
            step, core.step, core.idle_since_s = core.step, None, self._queue.now_s
            assert step is not None
            step.done()
        self._look_ahead()


def _times(speeds: CoreSpeeds, borrowed: int, is_beside: bool) -> float:
    """Returns how many times as long something takes as with one thread on an idle host."""
    with_threads: float = speeds.borrowed ** math.log2(1 + borrowed)
    return with_threads * (speeds.beside if is_beside else 1.0)
