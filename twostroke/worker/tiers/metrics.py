"""Reports what each tier did: in the metrics of one epoch of a worker, and in its event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.observability.telemetry import family_of
from twostroke.rpc.events import tier_to_message
from twostroke.rpc.v1 import control_pb2

AGE_BUCKETS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a tier holds at the moment."""

    used_bytes: int = 0
    most_bytes: int = 0
    blocks: int = 0
    """Blocks that can be loaded from it."""
    page_s: float = 0.0
    """Measured seconds to load one page into the pool."""
    is_up: bool = True
    """False where it has been turned off."""

    def with_group(self, other: TierUse) -> TierUse:
        """Returns the use of a tier by two page groups; blocks are counted by the first one."""
        used_bytes, most_bytes = self.used_bytes + other.used_bytes, self.most_bytes + other.most_bytes
        return TierUse(used_bytes, most_bytes, self.blocks, self.page_s, self.is_up and other.is_up)


Uses = Callable[[], Mapping[Tier, TierUse]]
"""Returns the use of every tier that the worker was started with."""


def tier_rates(uses: Mapping[Tier, TierUse]) -> list[control_pb2.TierRate]:
    """Returns what a worker reports of the tiers that it uses."""
    return [
        control_pb2.TierRate(
            tier=tier_to_message(tier),
            page_s=use.page_s,
            blocks=use.blocks,
            used_bytes=use.used_bytes,
            capacity_bytes=use.most_bytes,
        )
        for tier, use in uses.items()
        if use.is_up
    ]


GAUGES: Mapping[str, tuple[str, Callable[[TierUse], float]]] = {
    "bytes": ("Bytes that the tier takes.", lambda use: use.used_bytes),
    "capacity_bytes": ("Bytes that the tier may take.", lambda use: use.most_bytes),
    "blocks": ("Blocks that can be loaded from the tier.", lambda use: use.blocks),
    "page_seconds": ("Measured seconds to load one page.", lambda use: use.page_s),
    "up": ("1 where the tier is used, 0 where it has been turned off.", lambda use: use.is_up),
}

EVICTIONS = ("capacity", "damaged", "forgotten", "turned_off")
"""Reasons why a page leaves a tier."""
SKIPS = ("budget", "busy", "late")
"""Reasons why a page is not written to a tier."""


class TierMetrics:
    """Counters of all tiers that a worker has; every series has the labels `role` and `tier`."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self._registry = registry
        self._role = role

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twostroke_tier_{name}", text, ("role", "tier", *labels), registry=registry)

        self._hits = counter("hits_total", "Missing blocks that the tier held.")
        self._misses = counter("misses_total", "Missing blocks that the tier did not hold.")
        self._loaded = counter("loaded_pages_total", "Pages that were loaded and verified.")
        self._prefetched = counter("prefetched_pages_total", "Pages that were read for requests that still waited.")
        self._saved = counter("saved_seconds_total", "Predicted seconds of computing less the seconds of loading.")
        self._lost = counter("lost_seconds_total", "Seconds of loads that took longer than computing, beyond that.")
        self._refused = counter(
            "refused_loads_total", "Loads that were not begun: something else was predicted sooner."
        )
        self._given_up = counter(
            "given_up_loads_total", "Loads that were given up: something else would have been done."
        )
        self._written_bytes = counter("written_bytes_total", "Bytes written to the tier.")
        self._skipped = counter("skipped_pages_total", "Pages that were not written, by reason.", "reason")
        self._failures = counter("verification_failures_total", "Pages whose bytes were not what was stored.")
        self._evicted = counter("evicted_pages_total", "Pages that left the tier, by reason.", "reason")
        self._ages = Histogram(
            "twostroke_tier_eviction_age_seconds",
            "Time that pages were on the tier until others needed their room.",
            ("role", "tier"),
            buckets=AGE_BUCKETS_S,
            registry=registry,
        )

    def watch(self, uses: Uses) -> None:
        """Exports all series of these tiers from 0 on, and their use at every scrape."""
        for tier in uses():
            labels = self._labels(tier)
            for counter in (
                self._hits, self._misses, self._loaded, self._prefetched, self._saved, self._lost, self._refused,
                self._given_up, self._written_bytes, self._failures,
            ):  # fmt: skip
                counter.labels(*labels)
            for reason in EVICTIONS:
                self._evicted.labels(*labels, reason)
            for reason in SKIPS:
                self._skipped.labels(*labels, reason)
            self._ages.labels(*labels)
        self._registry.register(_TierGauges(self._role, uses))

    def looked_up(self, tier: Tier, hits: int, misses: int) -> None:
        self._hits.labels(*self._labels(tier)).inc(hits)
        self._misses.labels(*self._labels(tier)).inc(misses)

    def loaded(self, tier: Tier, pages: int, seconds: float, compute_s: float) -> None:
        """Counts a load that ended; `compute_s` is the predicted time of computing what it brought."""
        labels = self._labels(tier)
        self._loaded.labels(*labels).inc(pages)
        (self._saved if compute_s >= seconds else self._lost).labels(*labels).inc(abs(compute_s - seconds))

    def prefetched(self, tier: Tier, pages: int) -> None:
        self._prefetched.labels(*self._labels(tier)).inc(pages)

    def refused(self, tier: Tier) -> None:
        self._refused.labels(*self._labels(tier)).inc()

    def given_up(self, tier: Tier) -> None:
        self._given_up.labels(*self._labels(tier)).inc()

    def wrote(self, tier: Tier, size_bytes: int) -> None:
        self._written_bytes.labels(*self._labels(tier)).inc(size_bytes)

    def skipped(self, tier: Tier, reason: str) -> None:
        """Counts a page that was not copied to a tier. `reason`: one of SKIPS."""
        self._skipped.labels(*self._labels(tier), reason).inc()

    def failed_verification(self, tier: Tier) -> None:
        self._failures.labels(*self._labels(tier)).inc()

    def evicted(self, tier: Tier, reason: str, pages: int = 1) -> None:
        """Counts pages that left a tier. `reason`: one of EVICTIONS."""
        self._evicted.labels(*self._labels(tier), reason).inc(pages)

    def aged(self, tier: Tier, age_s: float) -> None:
        """Notes the eviction of a page to make room for another, and how long it had been on the tier."""
        self.evicted(tier, "capacity")
        self._ages.labels(*self._labels(tier)).observe(age_s)

    def _labels(self, tier: Tier) -> tuple[str, str]:
        return self._role, tier.name.lower()


class _TierGauges(Collector):
    def __init__(self, role: str, uses: Uses) -> None:
        self._role = role
        self._uses = uses

    def collect(self) -> Iterable[GaugeMetricFamily]:
        uses = self._uses()
        for name, (text, value) in GAUGES.items():
            values = {tier.name.lower(): value(use) for tier, use in uses.items()}
            yield family_of(GaugeMetricFamily, self._role, f"tier_{name}", text, values, "tier")


class TierChanges:
    """Announces what changes on the tiers of a page group in the epoch's event log, and counts it in the metrics.

    One owner, one thread: the worker's event loop.
    """

    def __init__(self, group: GroupKind) -> None:
        self._group = group
        self._log: EventLog | None = None
        self._metrics: TierMetrics | None = None

    def begin_epoch(self, log: EventLog) -> None:
        """Announces in this log from now on."""
        self._log = log

    def report_to(self, metrics: TierMetrics) -> None:
        """Counts in these metrics from now on."""
        self._metrics = metrics

    @property
    def metrics(self) -> TierMetrics:
        assert self._metrics is not None, "no epoch has begun"
        return self._metrics

    def stored(self, tier: Tier, block_hash: BlockHash) -> None:
        """Announces a block that can be loaded from now on."""
        if self._log is not None:
            self._log.stored(block_hash, tier, self._group)

    def wrote(self, tier: Tier, block_hash: BlockHash, size_bytes: int) -> None:
        """Announces a block that was written to a tier."""
        self.metrics.wrote(tier, size_bytes)
        self.stored(tier, block_hash)

    def removed(self, tier: Tier, block_hash: BlockHash, reason: str) -> None:
        """Announces a block that has left a tier."""
        self._announce_removed(tier, block_hash)
        self.metrics.evicted(tier, reason)

    def aged(self, tier: Tier, block_hash: BlockHash, age_s: float) -> None:
        """Announces a block that was evicted from a tier to make room for another."""
        self._announce_removed(tier, block_hash)
        self.metrics.aged(tier, age_s)

    def _announce_removed(self, tier: Tier, block_hash: BlockHash) -> None:
        if self._log is not None:
            self._log.removed(block_hash, tier, self._group)
