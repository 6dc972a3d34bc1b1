"""A router's Prometheus metrics, in a registry of its own."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from twostroke.observability.telemetry import ITL_BUCKETS_S, TTFT_BUCKETS_S, introduce

ROLE = "router"
DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of the seconds that whole requests take, from one token to a book."""
DECISION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
"""Buckets of the seconds that routing decisions take. They should stay under a few milliseconds."""
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
"""Buckets of the ratio of actual to predicted seconds: 1 is a perfect prediction."""
ERROR_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The prediction for one request, and what it really took."""

    predicted_blocks: int
    reused_blocks: int
    predicted_s: float
    """Predicted seconds from the decision to the first token."""
    actual_s: float | None
    """Actual seconds from the decision to the first token. None: an earlier attempt failed, which is not predicted."""


class SentTokens(Collector):
    """Counts tokens sent to clients, and the times between two tokens of one choice.

    Plain numbers become metrics only when they are scraped: prometheus_client takes a lock for each count.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._gaps = [0] * (len(ITL_BUCKETS_S) + 1)
        self._gaps_s = 0.0

    @property
    def tokens(self) -> int:
        return self._tokens

    def add(self, gap_s: float | None) -> None:
        """Counts a token. `gap_s`: seconds since the choice's previous token, if there was one."""
        self._tokens += 1
        if gap_s is not None:
            self._gaps[bisect_left(ITL_BUCKETS_S, gap_s)] += 1
            self._gaps_s += gap_s

    def collect(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily("twostroke_generation_tokens", "Tokens sent to clients.", labels=("role",))
        tokens.add_metric((ROLE,), self._tokens)
        yield tokens
        gaps = HistogramMetricFamily(
            "twostroke_inter_token_latency_seconds", "Between two tokens of one choice.", labels=("role",)
        )
        bounds = [*map(floatToGoString, (*ITL_BUCKETS_S, math.inf))]
        gaps.add_metric((ROLE,), [*zip(bounds, accumulate(self._gaps), strict=True)], self._gaps_s)
        yield gaps


class RouterMetrics:
    """Metrics of the router. Its packages add others to the registry, through the methods at the end."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.expiries = introduce(self.registry, ROLE)
        self.ttft_seconds = self.histogram("ttft_seconds", "Request received to first token sent.", TTFT_BUCKETS_S)
        self.sent_tokens = SentTokens()
        self.registry.register(self.sent_tokens)
        self.request_duration_seconds = self.histogram(
            "request_duration_seconds", "Request received to last token sent.", DURATION_BUCKETS_S
        )
        self.prompt_tokens_total = self.counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.cached_tokens_total = self.counter("cached_tokens", "Prompt tokens whose KV was reused.")
        self._add_truth()
        self.request_log_dropped_total = self.counter(
            "request_log_dropped", "Records that the request log could not write."
        )
        self.other_routers = self.gauge("other_routers", "Other routers that tell this one what they have placed.")
        self.foreign_reservations = self.gauge(
            "foreign_reservations", "Placements of other routers that wait for their first token."
        )
        self.reservations = self.gauge(
            "reservations", "Placements, of this router and of others, that workers' reports do not show yet."
        )
        self.open_requests = self.gauge("open_requests", "Requests that clients wait for.")
        self.engines_lost_total = self.counter(
            "engines_lost", "Epochs of workers that ended because the engine or its device had failed."
        )
        self.reopened_requests_total = self.counter(
            "reopened_requests", "Requests that went on at another decode worker (or another epoch of it)."
        )
        self.recovered_requests_total = self.counter(
            "recovered_requests", "Resumed choices that were found at their decode worker."
        )
        self.replayed_requests_total = self.counter(
            "replayed_requests", "Resumed choices that were computed again: no worker had them any more."
        )
        self.migrated_requests_total = self.counter(
            "migrated_requests", "Requests that left a decode worker because it drains; not among the reopened ones."
        )
        self.attached_requests_total = self.counter(
            "attached_requests", "Requests that went on at the same decode worker after its token stream broke."
        )
        self.stale_tokens_total = self.counter("stale_token_entries", "Token entries of no open attempt; ignored.")
        self.stale_epochs_refused_total = self.counter(
            "stale_epochs_refused", "Workers or events of an earlier epoch; ignored."
        )
        self._requests = self.labelled_counter("requests", "Requests ended, by status.", "status")
        self._requests.labels(ROLE, "ok")
        self._removed_parts = self.labelled_counter(
            "removed_prompt_parts", "Prompts without a part that changes with each request, by part.", "part"
        )
        self._decisions = self.labelled_counter(
            "decisions", "Placements, by policy and kind of page source.", "policy", "source"
        )

        self._cut_connections = self.labelled_counter(
            "grpc_connections_cut", "gRPC connections of clients that cost too much for what was answered.", "reason"
        )

    def _add_truth(self) -> None:
        """Adds metrics that compare what decisions predicted with what happened."""
        self.predicted_reused_blocks_total = self.counter(
            "predicted_reused_blocks", "Prompt blocks that the router expected to be found, over all requests."
        )
        self.reused_blocks_total = self.counter(
            "reused_blocks", "Prompt blocks that were found instead of computed, over the same requests."
        )
        self.overpredicted_blocks_total = self.counter(
            "overpredicted_blocks", "Prompt blocks that were expected to be found, and were computed."
        )
        self.underpredicted_blocks_total = self.counter(
            "underpredicted_blocks", "Prompt blocks that were expected to be computed, and were found."
        )
        self.ttft_prediction_ratio = self.histogram(
            "ttft_prediction_ratio", "Decision to first token, over what was predicted.", RATIO_BUCKETS
        )
        self.ttft_prediction_error_seconds = self.histogram(
            "ttft_prediction_error_seconds",
            "Decision to first token, apart from what was predicted, either way.",
            ERROR_BUCKETS_S,
        )

    def compare(self, compared: Comparison) -> None:
        predicted, reused = compared.predicted_blocks, compared.reused_blocks
        self.predicted_reused_blocks_total.inc(predicted)
        self.reused_blocks_total.inc(reused)
        self.overpredicted_blocks_total.inc(max(0, predicted - reused))
        self.underpredicted_blocks_total.inc(max(0, reused - predicted))
        if compared.actual_s is not None:
            self.ttft_prediction_error_seconds.observe(abs(compared.actual_s - compared.predicted_s))
        if compared.actual_s is not None and compared.predicted_s > 0:
            self.ttft_prediction_ratio.observe(compared.actual_s / compared.predicted_s)

    def count_request(self, status: str) -> None:
        """Counts a request that has ended. `status` is "ok" or the error's label."""
        self._requests.labels(ROLE, status).inc()

    def count_cut_connection(self, reason: str) -> None:
        """Counts a connection that was cut. `reason` is from `REASONS` in `router/grpc_listener/connection_cost.py`."""
        self._cut_connections.labels(ROLE, reason).inc()

    def count_removed_part(self, part: str) -> None:
        """Counts a part that a dialect removed from a prompt. `part` is its name, such as "billing_header"."""
        self._removed_parts.labels(ROLE, part).inc()

    def count_decision(self, policy: str, source: str) -> None:
        """Counts a decision. `source` is "prefill" or "local"."""
        self._decisions.labels(ROLE, policy, source).inc()

    def labelled_counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """Returns a counter whose first label is always the role."""
        return Counter(f"twostroke_{name}", help_text, ("role", *labels), registry=self.registry)

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"twostroke_{name}", help_text, ("role",), registry=self.registry, buckets=buckets).labels(
            role=ROLE
        )

    def counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"twostroke_{name}", help_text, ("role",), registry=self.registry).labels(role=ROLE)

    def gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"twostroke_{name}", help_text, ("role",), registry=self.registry).labels(role=ROLE)
