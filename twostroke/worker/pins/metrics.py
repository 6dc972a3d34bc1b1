"""Metrics of a worker's pins."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twostroke.kv_cache.pins.pin_table import PinHits, PinTable
from twostroke.observability.telemetry import family_of

REFUSALS = ("pin_cap", "pin_tenant_cap", "max_bytes", "expires_s", "pins")
"""Caps that refuse a pin."""


class PinMetrics:
    def __init__(self, role: str, registry: CollectorRegistry, table: PinTable) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twostroke_{name}", text, ("role", *labels), registry=registry)

        self._role = role
        self._hits = counter("pin_hits_total", "Admissions that found all blocks of a pin.").labels(role)
        self._saved = counter("pin_saved_seconds_total", "Predicted computing time that pins spared.").labels(role)
        self.expiries = counter("pin_expiries_total", "Pins whose time was over.").labels(role)
        self.displaced = counter(
            "displaced_hints_total", "Cache hints that ended early: a pin took their room."
        ).labels(role)
        self._refusals = counter("pin_refusals_total", "Pins that a cap refused.", "reason", "kind")
        for reason in REFUSALS:
            for kind in ("pin", "hint"):
                self._refusals.labels(role, reason, kind)
        registry.register(_Gauges(role, table))

    def found(self, hits: PinHits) -> None:
        self._hits.inc(hits.hits)
        self._saved.inc(hits.saved_s)

    def refused(self, reason: str, *, is_hint: bool) -> None:
        """Counts a refused pin. `reason`: one of REFUSALS."""
        self._refusals.labels(self._role, reason, "hint" if is_hint else "pin").inc()


class _Gauges(Collector):
    def __init__(self, role: str, table: PinTable) -> None:
        self._role = role
        self._table = table

    def collect(self) -> Iterable[GaugeMetricFamily]:
        limits, pages = self._table.limits, self._table.pinned_blocks
        for name, text, value in (
            ("pins", "Pins and cache hints held.", len(self._table)),
            ("pinned_pages", "Distinct pages that pins keep, whether or not they are filled.", pages),
            ("pinned_bytes", "Bytes of those pages.", pages * limits.page_bytes),
            ("pin_pages_limit", "Pages that pins may keep.", limits.most),
        ):
            yield family_of(GaugeMetricFamily, self._role, name, text, value)
