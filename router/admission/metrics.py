"""What admission counts."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.admission.false_rejections import Ghosts
from router.admission.queued_request import Reason
from router.metrics import DECISION_BUCKETS_S, ROLE
from twostroke.telemetry import TTFT_BUCKETS_S


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("role",)
        self.decision_seconds = Histogram(
            "twostroke_decision_seconds",
            "Time taken to choose workers for one answer.",
            labels,
            registry=registry,
            buckets=DECISION_BUCKETS_S,
        ).labels(role=ROLE)
        self.hold_seconds = Histogram(
            "twostroke_hold_seconds",
            "Time that held requests waited in the router for their turn.",
            labels,
            registry=registry,
            buckets=TTFT_BUCKETS_S,
        ).labels(role=ROLE)
        self._held = Gauge(
            "twostroke_held_requests", "Answers that wait in the router for their turn.", labels, registry=registry
        )
        self._fairness = Gauge(
            "twostroke_tenant_fairness",
            "Jain's index over tenants of prefill seconds given to those asked for, over a minute.",
            labels,
            registry=registry,
        )
        self._refusals = Counter(
            "twostroke_refusals", "Answers refused, by reason.", (*labels, "reason"), registry=registry
        )
        self._followed = Counter(
            "twostroke_followed_refusals",
            "Refusals of which it is found out whether they were right.",
            labels,
            registry=registry,
        ).labels(role=ROLE)
        self._false = Counter(
            "twostroke_false_refusals",
            "Refused, and would have had the first token in time.",
            labels,
            registry=registry,
        ).labels(role=ROLE)
        self._seen_followed = self._seen_false = 0
        for reason in Reason:
            self._refusals.labels(role=ROLE, reason=reason.value)

    def count_refusal(self, reason: Reason) -> None:
        self._refusals.labels(role=ROLE, reason=reason.value).inc()

    def show(self, held: Callable[[], float], fairness: Callable[[], float]) -> None:
        """Ask these at every scrape."""
        self._held.labels(role=ROLE).set_function(held)
        self._fairness.labels(role=ROLE).set_function(fairness)

    def follow(self, ghosts: Ghosts) -> None:
        """Count what ghosts have found since the last call."""
        self._followed.inc(ghosts.followed - self._seen_followed)
        self._false.inc(ghosts.false_refusals - self._seen_false)
        self._seen_followed, self._seen_false = ghosts.followed, ghosts.false_refusals
