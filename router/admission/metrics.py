"""Metrics of admission."""

from __future__ import annotations

from router.admission.false_rejections import FalseRejections
from router.admission.queued_request import Reason
from router.metrics import DECISION_BUCKETS_S, ROLE, RouterMetrics
from twostroke.telemetry import TTFT_BUCKETS_S


class AdmissionMetrics:
    def __init__(self, metrics: RouterMetrics) -> None:
        self.decision_seconds = metrics.histogram(
            "decision_seconds", "Time taken to choose workers for one request.", DECISION_BUCKETS_S
        )
        self.queue_seconds = metrics.histogram(
            "queue_seconds", "Time that queued requests waited in the router for their turn.", TTFT_BUCKETS_S
        )
        self.queued = metrics.gauge("queued_requests", "Requests that wait in the router for their turn.")
        self.fairness = metrics.gauge(
            "tenant_fairness", "Jain's index over tenants of prefill seconds given to those asked for, over a minute."
        )
        self._refusals = metrics.labelled_counter("refusals", "Requests refused, by reason.", "reason")
        self._followed = metrics.counter(
            "followed_refusals", "Refusals of which it is found out whether they were right."
        )
        self._false = metrics.counter("false_refusals", "Refused requests that would have had the first token in time.")
        self._seen_followed = self._seen_false = 0
        for reason in Reason:
            self._refusals.labels(ROLE, reason.value)

    def count_refusal(self, reason: Reason) -> None:
        self._refusals.labels(ROLE, reason.value).inc()

    def follow(self, rejections: FalseRejections) -> None:
        """Counts what was found out since the last call."""
        self._followed.inc(rejections.followed - self._seen_followed)
        self._false.inc(rejections.count - self._seen_false)
        self._seen_followed, self._seen_false = rejections.followed, rejections.count
