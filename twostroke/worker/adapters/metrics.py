"""Metrics of a worker's adapters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class AdapterMetrics:
    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"twostroke_{name}", text, ("role",), registry=registry).labels(role)

        self.count = Gauge("twostroke_adapters", "Adapters that are loaded.", ("role",), registry=registry).labels(role)
        self._loads = counter("adapter_loads_total", "Adapters that were loaded.")
        self._seconds = counter("adapter_load_seconds_total", "Time that loading adapters took.")
        self.evictions = counter("adapter_evictions_total", "Adapters that made room for others.")
        self.failures = counter("adapter_load_failures_total", "Adapters that could not be loaded.")

    def loaded(self, seconds: float, count: int) -> None:
        """Counts a load. `count`: adapters that are loaded now."""
        self._loads.inc()
        self._seconds.inc(seconds)
        self.count.set(count)
