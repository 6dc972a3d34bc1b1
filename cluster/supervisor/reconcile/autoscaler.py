"""Runs the planner in the supervisor: it gets what routers report, and sets the desired counts to what it decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from cluster.scaling.capacity import MOST_WORKERS, MeasuredCapacity, RequestDemand
from cluster.scaling.planner import REMEMBERED, FleetObservation, Planner, ScalingDecision
from cluster.supervisor.reconcile.desired import DesiredFleet
from cluster.supervisor.reconcile.plan import PlacedWorker, WorkerStage
from cluster.values.spec import FleetSpec
from cluster.values.worker_counts import ScalingStatus, WorkerCounts
from router.fleet.worker import token_cost
from twostroke.base.errors import InvalidRequest
from twostroke.config import Role
from twostroke.rpc.v1 import fleet_pb2
from twostroke.rpc.v1.control_pb2 import Load
from twostroke.scheduler.cost import StepCost

log = logging.getLogger(__name__)

STALE_S = 5.0
"""Seconds after which a router that has reported nothing is not counted on: it may be gone."""


@dataclass(slots=True)
class _Router:
    """The latest report of one router."""

    arrived: int
    """Requests that had arrived by its latest report; the increases are added to `Autoscaler._arrived`."""
    reported_at_s: float


class Autoscaler:
    def __init__(self, desired: DesiredFleet, spec: FleetSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._desired = desired
        self._spec = spec
        self._clock = clock
        self._planner = Planner(spec.promise, *spec.bounds, spec.scaling, may_switch=spec.flexible)
        self._routers: dict[str, _Router] = {}
        self._arrived = 0
        self._ended: deque[RequestDemand] = deque(maxlen=REMEMBERED)
        self._loads: dict[str, tuple[Role, Load]] = {}
        self._block_size = 1
        self._decision: ScalingDecision | None = None
        self._has_reports = False

    def report(self, report: fleet_pb2.ReportRequest) -> None:
        """Takes a router's report. Counting begins with its first one, since earlier requests may have been counted."""
        now_s = self._clock()
        self._has_reports = True
        known = self._routers.get(report.router_id)
        if known is not None:
            self._arrived += max(0, report.arrived - known.arrived)
        self._routers = {name: each for name, each in self._routers.items() if each.reported_at_s > now_s - STALE_S}
        self._routers[report.router_id] = _Router(report.arrived, now_s)
        self._ended += [
            RequestDemand(each.prompt_tokens - each.cached_tokens, each.cached_tokens, each.output_tokens)
            for each in report.ended
            if each.cached_tokens <= each.prompt_tokens
        ]
        self._loads = {
            each.worker_id: (Role(each.server.role), each.load)
            for each in report.workers
            if each.server.role in (Role.PREFILL, Role.DECODE)
        }
        self._block_size = report.block_size or 1

    async def run(self, placed_workers: Callable[[], list[PlacedWorker]]) -> None:
        """Observes and decides until it is cancelled, where scaling is configured."""
        while self._spec.scales:
            await asyncio.sleep(self._spec.scaling.tick_s)
            try:
                self._look(placed_workers())
            except Exception:
                log.exception("planner failed: counts stay as they are")

    def set_counts(self, prefill: int | None, decode: int | None, *, is_automatic: bool) -> None:
        """Sets the wanted counts, or lets the planner decide. Raises InvalidRequest for what no fleet can be."""
        if is_automatic:
            if not self._spec.scales:
                raise InvalidRequest(
                    "nothing is left to the planner here: start with --max-prefill or --max-decode above the counts",
                    field="--auto",
                )
            self._desired.set_automatic(is_automatic=True)
            return
        now = self._desired.wanted
        wanted = WorkerCounts(now.prefill if prefill is None else prefill, now.decode if decode is None else decode)
        if not (0 <= wanted.prefill <= MOST_WORKERS and 1 <= wanted.decode <= MOST_WORKERS):
            raise InvalidRequest(
                f"a fleet needs 0 or more prefill workers and 1 or more decode workers, of each {MOST_WORKERS} at "
                f"most, got {wanted}",
                field="--decode",
            )
        self._desired.scale(wanted, self._held(), is_automatic=False, reason=f"an operator asked for {wanted}")

    def status(self, placed_workers: Iterable[PlacedWorker]) -> ScalingStatus:
        wanted, serving = self._desired.wanted, _serving(placed_workers)
        return ScalingStatus(
            wanted_prefill=wanted.prefill,
            wanted_decode=wanted.decode,
            serving_prefill=serving.prefill,
            serving_decode=serving.decode,
            is_automatic=self._desired.state.is_automatic,
            reason=self._desired.state.reason,
            decision="" if self._decision is None else str(self._decision),
        )

    def _look(self, placed_workers: list[PlacedWorker]) -> None:
        if not self._has_reports:
            return  # without a report the load is unknown, not zero
        self._has_reports = False
        decision = self._decision = self._planner.decide(self._seen(placed_workers))
        wanted = self._desired.startable(decision.wanted)
        if self._desired.state.is_automatic and wanted != self._desired.wanted:
            self._desired.scale(wanted, self._held(), is_automatic=True, reason=str(decision))

    def _seen(self, placed_workers: Iterable[PlacedWorker]) -> FleetObservation:
        ended = tuple(self._ended)
        self._ended.clear()
        seen = FleetObservation(
            at_s=self._clock(),
            arrived=self._arrived,
            ended=ended,
            serving=_serving(placed_workers),
            desired=self._desired.wanted,
        )
        return with_loads(seen, self._loads, self._block_size)

    def _held(self) -> dict[str, int]:
        """Returns the number of blocks that each worker has."""
        return {
            name: load.pages_cached + load.pages_pinned + load.pages_active for name, (_, load) in self._loads.items()
        }


def with_loads(seen: FleetObservation, loads: Mapping[str, tuple[Role, Load]], block_size: int) -> FleetObservation:
    """Adds what workers report to an observation. A worker that has not reported yet has no slots."""
    decode = [load for role, load in loads.values() if role is Role.DECODE and load.slots]
    return replace(
        seen,
        capacity=capacity_from(loads, block_size),
        slots=min((load.slots for load in decode), default=1),
        backlog_s=sum(load.queued_s for role, load in loads.values() if role is Role.PREFILL),
        decode_waiting=sum(load.waiting for load in decode),
        streams=sum(load.running for load in decode),
        stream_tokens=sum(load.pages_active for load in decode) * block_size,
    )


def capacity_from(loads: Mapping[str, tuple[Role, Load]], block_size: int) -> MeasuredCapacity | None:
    """Returns the costs that workers have measured: prompts on prefill workers, streams on decode workers."""
    decode = [load for role, load in loads.values() if role is Role.DECODE and load.costs.step_s]
    prefill = [load for role, load in loads.values() if role is Role.PREFILL and load.costs.prompt_token_s] or decode
    if not decode:
        return None
    links = [link for load in decode for link in load.links if link.bytes_per_s]

    def mean(of: list[Load], name: str) -> float:
        return sum(float(getattr(token_cost(load), name)) for load in of) / len(of)

    return MeasuredCapacity(
        cost=StepCost(
            step_s=mean(decode, "step_s"),
            stream_s=mean(decode, "stream_s"),
            context_token_s=mean(decode, "context_token_s"),
            prompt_token_s=mean(prefill, "prompt_token_s"),
            prompt_step_s=mean(prefill, "prompt_step_s"),
            prompt_pair_s=mean(prefill, "prompt_pair_s"),
        ),
        step_tokens=max(1, min(load.costs.step_tokens for load in prefill)),
        decode_pool_tokens=min(load.pages_total for load in decode) * block_size,
        first_token_overhead_s=sum(link.latency_s for link in links) / len(links) if links else 0.0,
    )


def _serving(placed_workers: Iterable[PlacedWorker]) -> WorkerCounts:
    serving = [placed.role for placed in placed_workers if placed.stage is WorkerStage.SERVING]
    return WorkerCounts(serving.count(Role.PREFILL), serving.count(Role.DECODE))
