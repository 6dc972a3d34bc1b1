"""Judges from several signals whether one epoch of a worker is alive, suspect or dead. The tracker reads no clock.

ALIVE    Its events came lately. It gets new work.
SUSPECT  It is silent, or its event stream broke: its requests stay there, new work goes elsewhere.
DEAD     Every stream has been silent for longer, it refuses connections, or another epoch answers at its address:
         its requests continue elsewhere. A worker that was only frozen or cut off is alive again once it is heard.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.fleet.worker import Liveness, Worker
from router.metrics import ROLE, RouterMetrics
from twostroke.base.ids import Epoch, WorkerId
from twostroke.config import PatienceConfig
from twostroke.rpc.silence import TICK_S

log = logging.getLogger(__name__)

REFUSALS = 2
"""Refused connections in a row after which the port counts as closed, so that the process has ended."""


NEXT: dict[Liveness, frozenset[Liveness]] = {
    Liveness.ALIVE: frozenset({Liveness.SUSPECT, Liveness.DEAD}),
    Liveness.SUSPECT: frozenset({Liveness.ALIVE, Liveness.DEAD}),
    Liveness.DEAD: frozenset({Liveness.ALIVE}),
}


class Signal(enum.StrEnum):
    """Signs that a worker runs. Each comes over a connection of its own."""

    EVENTS = "events"
    """Batches of its event log, even empty ones. Only workers that send these get new work."""
    TOKENS = "tokens"
    """Batches of tokens, even empty ones."""


class LivenessCause(enum.StrEnum):
    HEARD = "heard"
    SILENCE = "silence"
    BROKEN = "broken"
    REFUSED = "refused"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Change:
    before: Liveness
    now: Liveness
    cause: LivenessCause
    signals: str
    """Text with the seconds since each signal, and the refused connections."""


class LivenessTracker:
    """Tracks one epoch of one worker. Every method returns the change that it made, if any.

    All times are of the router's `WakingClock`, which stands still while the router itself is late.
    """

    def __init__(self, patience: PatienceConfig, now_s: float) -> None:
        self.liveness = Liveness.SUSPECT
        self._patience = patience
        self._begun_s = now_s
        self._heard_s: dict[Signal, float] = {}
        self._refusals = 0

    def hear(self, signal: Signal, now_s: float) -> Change | None:
        revives = signal is Signal.EVENTS and self.liveness is not Liveness.ALIVE
        before = self._signals(now_s) if revives else ""
        self._heard_s[signal] = now_s
        self._refusals = 0
        return self._move(Liveness.ALIVE, LivenessCause.HEARD, before) if revives else None

    def break_off(self, now_s: float) -> Change | None:
        """Notes that its event stream broke."""
        if self.liveness is Liveness.ALIVE:
            return self._move(Liveness.SUSPECT, LivenessCause.BROKEN, self._signals(now_s))
        return None

    def refuse(self, now_s: float) -> Change | None:
        """Notes that a connection to its address was refused."""
        self._refusals += 1
        if self._refusals < REFUSALS or self.liveness is not Liveness.SUSPECT:  # an ALIVE one is only full
            return None
        return self._move(Liveness.DEAD, LivenessCause.REFUSED, self._signals(now_s))

    def replace(self, now_s: float) -> Change | None:
        """Notes that another epoch answers at its address."""
        if self.liveness is not Liveness.DEAD:
            return self._move(Liveness.DEAD, LivenessCause.REPLACED, self._signals(now_s))
        return None

    def look(self, now_s: float) -> Change | None:
        """Judges silence. Call it regularly."""
        if self.liveness is Liveness.ALIVE and self.silence_s(Signal.EVENTS, now_s) >= self._patience.suspect_after_s:
            return self._move(Liveness.SUSPECT, LivenessCause.SILENCE, self._signals(now_s))
        if not self._heard_s:  # it has no requests yet
            return None
        silence_s = min(self.silence_s(signal, now_s) for signal in Signal)
        if self.liveness is Liveness.SUSPECT and silence_s >= self._patience.dead_after_s:
            return self._move(Liveness.DEAD, LivenessCause.SILENCE, self._signals(now_s))
        return None

    def silence_s(self, signal: Signal, now_s: float) -> float:
        return now_s - self._heard_s.get(signal, self._begun_s)

    def _move(self, liveness: Liveness, cause: LivenessCause, signals: str) -> Change:
        assert liveness in NEXT[self.liveness], f"{self.liveness} -> {liveness}"
        before, self.liveness = self.liveness, liveness
        return Change(before, liveness, cause, signals)

    def _signals(self, now_s: float) -> str:
        missing = " ".join(f"{signal}_silent_s={now_s - heard_s:.2f}" for signal, heard_s in self._heard_s.items())
        return f"{missing or 'never_heard'} refusals={self._refusals}"


class WakingClock:
    """Counts the seconds in which a process ran. Leaves out those in which it was frozen or its event loop was blocked.

    Call `tick` every `tick_s`. It counts as at most that, however late it comes.
    """

    def __init__(self, tick_s: float, now_s: float) -> None:
        self.tick_s = tick_s
        self.awake_s = 0.0
        self.late_s = 0.0
        """Seconds that were not counted."""
        self._ticked_s = now_s

    def tick(self, now_s: float) -> None:
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        counted_s = min(passed_s, self.tick_s)
        self.awake_s += counted_s
        self.late_s += passed_s - counted_s


class FailureDetector:
    """Keeps a `LivenessTracker` for every watched epoch of a worker, and passes it the signals.

    Signals of other epochs, which have just ended, are ignored.
    """

    def __init__(
        self, patience: PatienceConfig, metrics: RouterMetrics, on_change: Callable[[Worker, Change], None]
    ) -> None:
        self.patience = patience
        self._changes = metrics.labelled_counter(
            "worker_judgements",
            "Workers found alive, suspect or dead, and by which signal.",
            "worker",
            "liveness",
            "cause",
        )
        self._late_seconds = metrics.counter(
            "own_lateness_seconds", "Time in which the router was late itself, so that no worker's silence counted."
        )
        self._on_change = on_change
        self._clock = WakingClock(TICK_S, time.monotonic())
        self._watched: dict[tuple[WorkerId, Epoch], tuple[Worker, LivenessTracker]] = {}

    @property
    def awake_s(self) -> float:
        """Seconds on the clock that stands still while this process is late."""
        return self._clock.awake_s

    async def run(self) -> None:
        """Looks for silence until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            late_s = self._clock.late_s
            self._clock.tick(time.monotonic())
            self._late_seconds.inc(self._clock.late_s - late_s)
            for worker, tracker in list(self._watched.values()):
                self._note(worker, tracker.look(self.awake_s))

    def begin(self, worker: Worker) -> None:
        self._watched[worker.worker_id, worker.epoch] = (worker, LivenessTracker(self.patience, self.awake_s))

    def end(self, worker: Worker) -> None:
        del self._watched[worker.worker_id, worker.epoch]

    def heard(self, worker: Worker, signal: Signal) -> None:
        self._judge(worker, lambda tracker: tracker.hear(signal, self.awake_s))

    def broke(self, worker: Worker) -> None:
        self._judge(worker, lambda tracker: tracker.break_off(self.awake_s))

    def refused(self, worker: Worker) -> None:
        self._judge(worker, lambda tracker: tracker.refuse(self.awake_s))

    def replaced(self, worker: Worker) -> None:
        self._judge(worker, lambda tracker: tracker.replace(self.awake_s))

    def _judge(self, worker: Worker, signal: Callable[[LivenessTracker], Change | None]) -> None:
        watched = self._watched.get((worker.worker_id, worker.epoch))
        if watched is not None:
            self._note(worker, signal(watched[1]))

    def _note(self, worker: Worker, change: Change | None) -> None:
        if change is None:
            return
        log.log(
            logging.INFO if change.now is Liveness.ALIVE else logging.WARNING,
            "worker judged worker=%s epoch=%s liveness=%s was=%s cause=%s %s",
            worker.worker_id,
            worker.epoch,
            change.now,
            change.before,
            change.cause,
            change.signals,
        )
        self._changes.labels(ROLE, worker.worker_id, change.now.value, change.cause.value).inc()
        self._on_change(worker, change)
