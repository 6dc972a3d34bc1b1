"""What a router counts about its prefix index: how large it is, how far behind the workers, how often it went wrong."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.prefix_index import Applied, PrefixIndex
from twostroke.ids import WorkerId

LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""From a batch in the same machine room to one that had to be asked for again."""


class IndexMetrics:
    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self._role = role
        self._blocks = Gauge(
            "twostroke_index_blocks",
            "Different block names in the prefix index, counted once per tier.",
            ("role",),
            registry=registry,
        ).labels(role=role)
        self._holdings = Gauge(
            "twostroke_index_holdings",
            "Blocks in the prefix index, counted once per tier and worker that holds them.",
            ("role",),
            registry=registry,
        ).labels(role=role)
        self._lag_s = Histogram(
            "twostroke_event_lag_seconds",
            "A worker published a batch until it was in the index, by both wall clocks; replayed batches too.",
            ("role",),
            registry=registry,
            buckets=LAG_BUCKETS_S,
        ).labels(role=role)
        self._snapshots = Counter(
            "twostroke_event_snapshots", "Snapshots taken over.", ("role", "worker"), registry=registry
        )
        self._troubles = {
            Applied.OLD: Counter(
                "twostroke_event_repeats",
                "Event batches that were in the index already.",
                ("role", "worker"),
                registry=registry,
            ),
            Applied.GAP: Counter(
                "twostroke_event_gaps",
                "Event batches that did not follow on the last one.",
                ("role", "worker"),
                registry=registry,
            ),
            Applied.DIVERGED: Counter(
                "twostroke_event_divergences",
                "Batches whose count or digest did not match the index.",
                ("role", "worker"),
                registry=registry,
            ),
        }

    def watch(self, index: PrefixIndex) -> None:
        """Show its size at every scrape."""
        self._blocks.set_function(lambda: len(index))
        self._holdings.set_function(lambda: sum(index.block_count(worker) for worker in index.workers))

    def count_snapshot(self, worker: WorkerId) -> None:
        self._snapshots.labels(self._role, worker).inc()
        for trouble in self._troubles.values():  # from 0 on: what is counted from its first time on has no rate then
            trouble.labels(self._role, worker)

    def count_trouble(self, verdict: Applied, worker: WorkerId) -> None:
        """A batch that was not applied, or not rightly."""
        self._troubles[verdict].labels(self._role, worker).inc()

    def observe_lag(self, published_s: float, now_s: float) -> None:
        """Clocks of two machines may disagree: what seems to come from the future came at once."""
        if published_s > 0:
            self._lag_s.observe(max(0.0, now_s - published_s))
