"""Judges which workers are alive, from every signal that the router gets of them, and looks for silence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from router.fleet.liveness import Change, Liveness, LivenessTracker, Signal, WakingClock
from router.fleet.worker import Worker
from router.metrics import ROLE, RouterMetrics
from twostroke.base.ids import Epoch, WorkerId
from twostroke.config import PatienceConfig
from twostroke.rpc.silence import TICK_S

log = logging.getLogger(__name__)


class FailureDetector:
    """Keeps a `LivenessTracker`, whose methods say what each signal means, for every epoch that it watches.

    Signals of other epochs are ignored: those have just ended.
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
        """A clock on which this process's own lateness takes no time."""
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
