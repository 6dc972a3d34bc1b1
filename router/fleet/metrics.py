"""Gauges of the workers and of scaling, made when a router is scraped."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.metrics import ROLE
from twostroke.rpc.v1.control_pb2 import Load
from twostroke.rpc.v1.fleet_pb2 import Scaling

_WORKER_GAUGES = {
    "running": "Sequences that hold pages.",
    "waiting": "Requests or pulls that hold nothing yet.",
    "queued_tokens": "Known but not yet computed tokens.",
    "seconds_per_token": "Seconds of prefill per token, smoothed.",
    "seconds_per_step": "Seconds per decode step, smoothed.",
    "event_age_seconds": "Seconds since the last event batch came in.",
    "index_blocks": "Blocks that the prefix index knows it to hold, on all tiers.",
}


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker at the moment of a scrape."""

    worker: str
    role: str
    status: str
    load: Load
    event_age_s: float | None
    """Seconds since its last event batch; None before the first."""
    index_blocks: int


class FleetMetrics(Collector):
    """Makes the gauges of workers at each scrape: workers come and go, and report many times a second."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Iterable[WorkerReading]]) -> None:
        self._read = read
        registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        of_worker = ("role", "worker_role", "worker")
        workers = GaugeMetricFamily(
            "twostroke_fleet_workers", "Workers by status.", labels=("role", "worker_role", "state")
        )
        pages = GaugeMetricFamily("twostroke_worker_pages", "Pages by state.", labels=(*of_worker, "state"))
        gauges = {
            name: GaugeMetricFamily(f"twostroke_worker_{name}", help_text, labels=of_worker)
            for name, help_text in _WORKER_GAUGES.items()
        }
        readings = list(self._read())
        for (role, status), count in collections.Counter((r.role, r.status) for r in readings).items():
            workers.add_metric((ROLE, role, status), count)
        for reading in readings:
            labels = (ROLE, reading.role, reading.worker)
            for name, value in _values(reading).items():
                gauges[name].add_metric(labels, value)
            for state, count in _pages(reading.load).items():
                pages.add_metric((*labels, state), count)
        return [workers, pages, *gauges.values()]


def _values(reading: WorkerReading) -> dict[str, float]:
    load = reading.load
    values = {
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "seconds_per_token": load.seconds_per_token,
        "seconds_per_step": load.seconds_per_step,
        "index_blocks": reading.index_blocks,
    }
    if reading.event_age_s is not None:
        values["event_age_seconds"] = reading.event_age_s
    return values


def _pages(load: Load) -> dict[str, int]:
    return {
        "free": load.pages_free,
        "cached": load.pages_cached,
        "arriving": load.pages_arriving,
        "active": load.pages_active,
        "quarantined": load.pages_quarantined,
    }


class ScalingMetrics(Collector):
    """Shows what the supervisor says about scaling. All routers say the same."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._said = Scaling()
        registry.register(self)

    def take(self, said: Scaling) -> None:
        self._said = said

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        wanted = GaugeMetricFamily(
            "twostroke_wanted_workers", "Workers that there shall be.", labels=("role", "worker_role")
        )
        wanted.add_metric((ROLE, "prefill"), self._said.wanted_prefill)
        wanted.add_metric((ROLE, "decode"), self._said.wanted_decode)
        yield wanted
        automatic = GaugeMetricFamily(
            "twostroke_scaling_automatic", "1 where the autoscaler decides.", labels=("role",)
        )
        automatic.add_metric((ROLE,), self._said.automatic)
        yield automatic
        for name, text, value in (
            ("scaling_changes", "Times that the number of wanted workers changed.", self._said.changes),
            ("role_switches", "Workers that were told to become the other role.", self._said.switches),
        ):
            counter = CounterMetricFamily(f"twostroke_{name}", text, labels=("role",))
            counter.add_metric((ROLE,), value)
            yield counter
