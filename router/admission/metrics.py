"""Metrics of admission."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.admission.false_rejections import FalseRejections
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
        self.queue_seconds = Histogram(
            "twostroke_queue_seconds",
            "Time that queued requests waited in the router for their turn.",
            labels,
            registry=registry,
            buckets=TTFT_BUCKETS_S,
        ).labels(role=ROLE)
        self._queued = Gauge(
            "twostroke_queued_requests", "Requests that wait in the router for their turn.", labels, registry=registry
        )
        self._fairness = Gauge(
            "twostroke_tenant_fairness",
            "Jain's index over tenants of prefill seconds given to those asked for, over a minute.",
            labels,
            registry=registry,
        )
        self._refusals = Counter(
            "twostroke_refusals", "Requests refused, by reason.", (*labels, "reason"), registry=registry
        )
        self._followed = Counter(
            "twostroke_followed_refusals",
            "Refusals of which it is found out whether they were right.",
            labels,
            registry=registry,
        ).labels(role=ROLE)
        self._false = Counter(
            "twostroke_false_refusals",
            "Refused requests that would have had the first token in time.",
            labels,
            registry=registry,
        ).labels(role=ROLE)
        self._seen_followed = self._seen_false = 0
        for reason in Reason:
            self._refusals.labels(role=ROLE, reason=reason.value)

    def count_refusal(self, reason: Reason) -> None:
        self._refusals.labels(role=ROLE, reason=reason.value).inc()

    def show(self, queued: Callable[[], float], fairness: Callable[[], float]) -> None:
        """Calls these at every scrape."""
        self._queued.labels(role=ROLE).set_function(queued)
        self._fairness.labels(role=ROLE).set_function(fairness)

    def follow(self, rejections: FalseRejections) -> None:
        """Counts what was found out since the last call."""
        self._followed.inc(rejections.followed - self._seen_followed)
        self._false.inc(rejections.count - self._seen_false)
        self._seen_followed, self._seen_false = rejections.followed, rejections.count
