"""What the supervisor says of scaling, for whoever scrapes a router. All routers say the same."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.metrics import ROLE
from twostroke.rpc.v1.fleet_pb2 import Scaling


class ScalingMetrics(Collector):
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
        automatic = GaugeMetricFamily("twostroke_scaling_automatic", "1 where the planner decides.", labels=("role",))
        automatic.add_metric((ROLE,), self._said.automatic)
        yield automatic
        for name, text, value in (
            ("scaling_changes", "Times that the number of wanted workers changed.", self._said.changes),
            ("role_switches", "Workers that were told to become the other role.", self._said.switches),
        ):
            counter = CounterMetricFamily(f"twostroke_{name}", text, labels=("role",))
            counter.add_metric((ROLE,), value)
            yield counter
