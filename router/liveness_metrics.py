"""What a router counts of its judgements about who is alive."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from router.liveness import Change
from twostroke.ids import WorkerId


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
