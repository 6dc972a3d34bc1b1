"""Watches over the lives of a fleet's workers: every sign of life comes here, and silence is looked for ten times a
second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from router.fleet.liveness import Change, Life, Liveness, Signal, Wakefulness
from router.fleet.worker import Member
from twostroke.config import PatienceConfig
from twostroke.ids import Epoch, WorkerId
from twostroke.rpc.silence import TICK_S

log = logging.getLogger(__name__)


class Vigil:
    """Signs of lives that it does not watch over are ignored: they have just ended."""

    def __init__(
        self, patience: PatienceConfig, metrics: LivenessMetrics, on_change: Callable[[Member, Change], None]
    ) -> None:
        self.patience = patience
        self._metrics = metrics
        self._on_change = on_change
        self._clock = Wakefulness(TICK_S, time.monotonic())
        self._watched: dict[tuple[WorkerId, Epoch], tuple[Member, Liveness]] = {}

    @property
    def awake_s(self) -> float:
        """A clock on which this process's own lateness takes no time."""
        return self._clock.awake_s

    async def run(self) -> None:
        """Look for silence until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            late_s = self._clock.late_s
            self._clock.tick(time.monotonic())
            self._metrics.late_seconds_total.inc(self._clock.late_s - late_s)
            for member, liveness in list(self._watched.values()):
                self._note(member, liveness.look(self.awake_s))

    def begin(self, member: Member) -> None:
        self._watched[member.worker, member.epoch] = (member, Liveness(self.patience, self.awake_s))

    def end(self, member: Member) -> None:
        del self._watched[member.worker, member.epoch]

    def heard(self, member: Member, signal: Signal) -> None:
        liveness = self._liveness(member)
        if liveness is not None:
            self._note(member, liveness.hear(signal, self.awake_s))

    def broke(self, member: Member) -> None:
        """Its event stream did."""
        liveness = self._liveness(member)
        if liveness is not None:
            self._note(member, liveness.break_off(self.awake_s))

    def refused(self, member: Member) -> None:
        """Nobody listens at its address."""
        liveness = self._liveness(member)
        if liveness is not None:
            self._note(member, liveness.refuse(self.awake_s))

    def replaced(self, member: Member) -> None:
        """Another life answers at its address."""
        liveness = self._liveness(member)
        if liveness is not None:
            self._note(member, liveness.replace(self.awake_s))

    def _liveness(self, member: Member) -> Liveness | None:
        _, liveness = self._watched.get((member.worker, member.epoch), (None, None))
        return liveness

    def _note(self, member: Member, change: Change | None) -> None:
        if change is None:
            return
        log.log(
            logging.INFO if change.life is Life.ALIVE else logging.WARNING,
            "worker judged worker=%s epoch=%s life=%s was=%s cause=%s %s",
            member.worker,
            member.epoch,
            change.life,
            change.before,
            change.cause,
            change.signals,
        )
        self._metrics.count(member.worker, change)
        self._on_change(member, change)


class LivenessMetrics:
    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self._role = role
        self._judgements = Counter(
            "twostroke_worker_judgements",
            "Workers found alive, suspect or dead, and by which signal.",
            ("role", "worker", "life", "cause"),
            registry=registry,
        )
        self.late_seconds_total = Counter(
            "twostroke_own_lateness_seconds",
            "Time in which the router was late itself, so that nobody's silence counted.",
            ("role",),
            registry=registry,
        ).labels(role=role)

    def count(self, worker: WorkerId, change: Change) -> None:
        self._judgements.labels(role=self._role, worker=worker, life=change.life.value, cause=change.cause.value).inc()
