"""Metrics of the workers and of scaling, made at each scrape."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.fleet.worker import Worker
from router.metrics import ROLE
from twostroke.base.ids import WorkerId
from twostroke.rpc.v1.fleet_pb2 import Scaling

_LOAD_GAUGES = {
    "running": "Sequences that hold pages.",
    "waiting": "Requests or pulls that hold nothing yet.",
    "queued_tokens": "Known but not yet computed tokens.",
    "seconds_per_token": "Seconds of prefill per token, smoothed.",
    "seconds_per_step": "Seconds per decode step, smoothed.",
}
"""Gauges that show a field of the worker's load report."""
_WORKER_GAUGES = {
    **_LOAD_GAUGES,
    "event_age_seconds": "Seconds since the last event batch came in.",
    "index_blocks": "Blocks that the prefix index knows it to hold, on all tiers.",
}
_PAGE_STATES = ("free", "cached", "pinned", "arriving", "active", "quarantined")


class FleetMetrics(Collector):
    """Makes the gauges of workers only at a scrape, because workers come and go and report many times a second."""

    def __init__(
        self, registry: CollectorRegistry, workers: Mapping[WorkerId, Worker], block_count: Callable[[WorkerId], int]
    ) -> None:
        self._workers = workers
        self._block_count = block_count
        registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        of_worker = ("role", "worker_role", "worker")
        states = ("role", "worker_role", "state")
        workers = GaugeMetricFamily("twostroke_fleet_workers", "Workers by status.", labels=states)
        pages = GaugeMetricFamily("twostroke_worker_pages", "Pages by state.", labels=(*of_worker, "state"))
        gauges = {
            name: GaugeMetricFamily(f"twostroke_worker_{name}", help_text, labels=of_worker)
            for name, help_text in _WORKER_GAUGES.items()
        }
        by_status = collections.Counter((each.role.value, each.status.value) for each in self._workers.values())
        for (role, status), count in by_status.items():
            workers.add_metric((ROLE, role, status), count)
        for worker in self._workers.values():
            labels = (ROLE, worker.role.value, worker.worker_id)
            for name in _LOAD_GAUGES:
                gauges[name].add_metric(labels, getattr(worker.load, name))
            gauges["index_blocks"].add_metric(labels, self._block_count(worker.worker_id))
            if worker.reported_at_s is not None:
                gauges["event_age_seconds"].add_metric(labels, time.monotonic() - worker.reported_at_s)
            for state in _PAGE_STATES:
                pages.add_metric((*labels, state), getattr(worker.load, f"pages_{state}"))
        return [workers, pages, *gauges.values()]


class ScalingMetrics(Collector):
    """Metrics of the supervisor's scaling. They are the same at all routers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._scaling = Scaling()
        registry.register(self)

    def take(self, scaling: Scaling) -> None:
        self._scaling = scaling

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        scaling = self._scaling
        wanted = GaugeMetricFamily(
            "twostroke_wanted_workers", "Workers that there should be.", labels=("role", "worker_role")
        )
        wanted.add_metric((ROLE, "prefill"), scaling.wanted_prefill)
        wanted.add_metric((ROLE, "decode"), scaling.wanted_decode)
        yield wanted
        for kind, name, text, value in (
            (GaugeMetricFamily, "scaling_automatic", "1 where the autoscaler decides.", scaling.automatic),
            (GaugeMetricFamily, "fleet_reloading", "1 while workers begin anew with other weights.", scaling.reloading),
            (
                CounterMetricFamily,
                "scaling_changes",
                "Times that the number of wanted workers changed.",
                scaling.changes,
            ),
            (
                CounterMetricFamily,
                "role_switches",
                "Workers that were told to become the other role.",
                scaling.switches,
            ),
        ):
            family = kind(f"twostroke_{name}", text, labels=("role",))
            family.add_metric((ROLE,), value)
            yield family
