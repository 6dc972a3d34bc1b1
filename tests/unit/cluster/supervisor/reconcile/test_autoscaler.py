"""What routers report, as the planner is shown it; and what a report that is wrong does not do."""

from __future__ import annotations

import asyncio
import math

from cluster.scaling.planner import REMEMBERED, FleetObservation
from cluster.supervisor.reconcile.autoscaler import Autoscaler, capacity_from, with_loads
from cluster.values.worker_counts import WorkerCounts
from tests.unit.cluster.scaling.fleets import Backend, config, supervising
from twostroke.config import ClusterConfig, Role, ScalingConfig
from twostroke.rpc.v1 import control_pb2, fleet_pb2
from twostroke.scheduler.cost import StepCost

COSTS = control_pb2.StepCosts(step_s=0.02, stream_s=0.001, prompt_token_s=1e-4, step_tokens=512)
PER_REPORT = 64


def load(**facts: object) -> control_pb2.Load:
    return control_pb2.Load(**{"slots": 8, "pages_total": 1000, "costs": COSTS} | facts)  # type: ignore[arg-type]  # any field


def report(
    router: int = 0, arrived: int = 0, ended: int = PER_REPORT, costs: control_pb2.StepCosts = COSTS
) -> fleet_pb2.ReportRequest:
    server = control_pb2.ServerInfo(server_id="decode-0", role="decode")
    answer = fleet_pb2.EndedAnswer(prompt_tokens=100, output_tokens=10)
    worker = control_pb2.Load(slots=8, pages_total=1000, costs=costs)
    return fleet_pb2.ReportRequest(
        router_id=f"router-{router}",
        arrived=arrived,
        ended=[answer] * ended,
        workers=[control_pb2.WorkerLoad(worker_id="decode-0", load=worker, server=server)],
        block_size=16,
    )


async def test_a_supervisor_that_plans_nothing_keeps_no_more_of_reports_than_a_planner_needs() -> None:
    now_s = 0.0
    async with supervising(Backend(), config(flexible=False)) as supervisor:
        autoscaler = Autoscaler(supervisor._desired, supervisor._spec, clock=lambda: now_s)
        for router in range(20):
            autoscaler.report(report(router))
            now_s += 60.0
        assert len(autoscaler._ended) <= REMEMBERED
        assert len(autoscaler._routers) <= 2


async def test_arrivals_are_those_of_all_routers_and_never_fall() -> None:
    async with supervising(Backend(), config(flexible=False)) as supervisor:
        autoscaler = Autoscaler(supervisor._desired, supervisor._spec, clock=lambda: 0.0)
        arrived = []
        for router, said in ((0, 100), (1, 50), (0, 110), (1, 53), (0, 10), (0, 14)):
            autoscaler.report(report(router, said))
            arrived.append(autoscaler._seen([]).arrived)
        assert arrived == [0, 0, 10, 13, 13, 17], "a router that counts anew takes nothing away"


async def test_a_planner_that_fails_leaves_counts_as_they_are_and_the_supervisor_alive() -> None:
    quick = ScalingConfig(max_decode=2, tick_s=0.01, average_s=0.02, up_s=0.01)
    async with supervising(Backend(), ClusterConfig(prefill=1, decode=1, scaling=quick)) as supervisor:
        for look in range(10):
            supervisor._autoscaler.report(
                report(arrived=10 * look, costs=control_pb2.StepCosts(step_s=0.02, prompt_token_s=math.inf))
            )
            await asyncio.sleep(0.02)
        assert supervisor._run_task is not None
        assert not supervisor._run_task.done()
        assert (await supervisor.scaling())["wanted_decode"] == 1


async def test_a_worker_that_sleeps_is_not_replaced_and_none_goes_because_of_it() -> None:
    quick = ScalingConfig(max_prefill=3, tick_s=0.01, average_s=0.02, up_s=0.01)
    async with supervising(Backend(), ClusterConfig(prefill=1, decode=1, scaling=quick)) as supervisor:
        await supervisor.sleep("prefill-0", 1.0, force=True)
        for _ in range(10):
            supervisor._autoscaler.report(report(ended=0))
            await asyncio.sleep(0.02)
        assert supervisor._autoscaler.status([]).decision, "the planner has looked"
        assert set(supervisor._fleet._workers) == {"prefill-0", "decode-0"}
        desired = supervisor._desired
        for prefill, startable in ((1, 0), (2, 1), (3, 2)):
            assert desired.startable(WorkerCounts(prefill, 1)) == WorkerCounts(startable, 1)
        desired.scale(WorkerCounts(2, 1), {}, is_automatic=True, reason="more")
        assert desired.wanted == WorkerCounts(2, 1)
        for prefill, startable in ((1, 1), (2, 2), (3, 2)):
            assert desired.startable(WorkerCounts(prefill, 1)) == WorkerCounts(startable, 1)


def test_a_worker_that_has_not_reported_yet_has_no_say() -> None:
    loads = {"decode-0": (Role.DECODE, load(running=3, pages_active=5)), "decode-1": (Role.DECODE, control_pb2.Load())}
    both = WorkerCounts(0, 2)
    seen = with_loads(FleetObservation(at_s=1.0, arrived=0, serving=both, desired=both), loads, 16)
    assert (seen.slots, seen.streams, seen.stream_tokens) == (8, 3, 80)


def test_the_planner_counts_a_step_for_each_token_that_a_stream_gets() -> None:
    costs = control_pb2.StepCosts(step_s=0.02, stream_s=0.001, context_token_s=1e-6, prompt_token_s=1e-4)
    each = control_pb2.StreamStep(rows=3.0, tokens=2.0)
    loads = {name: (Role.DECODE, load(costs=costs, stream_step=each)) for name in ("decode-0", "decode-1")}
    capacity = capacity_from(loads, 16)
    assert capacity is not None
    assert capacity.cost == StepCost(0.01, 0.0015, 5e-7, prompt_token_s=1e-4)
