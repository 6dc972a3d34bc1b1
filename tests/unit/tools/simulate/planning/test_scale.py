"""The planner over a simulated fleet: it follows a surge, costs less than all workers, and answers everybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.scaling.planner import Planner
from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from tests.unit.tools.simulate.fleets import BLOCK, even_trace
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.simulation import simulate
from tools.simulate.planning.scale import Planned, compared, surged
from tools.simulate.variants import OURS, policy_of
from twostroke.base.errors import ConfigError
from twostroke.config import Bounds, ScalingConfig


def test_a_surge_is_followed_up_and_down_for_less_than_all_workers_cost() -> None:
    trace = surged(even_trace(requests=120, tokens=5120, gap_s=1.0), 3.0)
    shape = FleetShape(prefill=1, decode=1)
    promise, pace = LatencyTargets(ttft_s=1.5, itl_s=0.05), ScalingConfig(max_prefill=4, down_s=30.0)
    planned, (scaled, small, all_of_them) = compared(trace, shape, promise, pace, start_s=5.0)
    assert scaled.not_answered == small.not_answered == all_of_them.not_answered == 0
    assert small.worker_s < scaled.worker_s < all_of_them.worker_s
    assert small.attainment < scaled.attainment
    counts = [outlook.wanted.prefill for _, outlook in planned.history]
    assert max(counts) > 1
    assert counts[-1] < max(counts)


def test_answers_that_become_long_get_decode_workers_and_no_prefill_workers() -> None:
    even = even_trace(requests=230, tokens=512, gap_s=0.4)
    rows = (replace(row, output_tokens=600 if 40 <= at < 90 else 30) for at, row in enumerate(even.rows))
    pace, one_to_three = ScalingConfig(down_s=15.0), Bounds(least=1, most=3)
    planner = Planner(LatencyTargets(ttft_s=1.5, itl_s=0.017), one_to_three, one_to_three, pace, may_switch=True)
    planned = Planned(planner, WorkerCounts(1, 1), pace.tick_s, start_s=3.0, block_size=BLOCK)
    setup = RoutingSetup(OURS, lambda: policy_of(OURS), holds=True)
    simulate(replace(even, rows=tuple(rows)), FleetShape(prefill=3, decode=3), setup, planned)
    assert {outlook.wanted.prefill for _, outlook in planned.history} == {1}
    decode = [outlook.wanted.decode for _, outlook in planned.history]
    assert max(decode) > 1
    assert decode[-1] == 1


def test_a_surge_keeps_the_order_and_the_pace_outside_the_middle_third() -> None:
    trace = surged(even_trace(requests=9), 2.0)
    assert [row.timestamp_s for row in trace.rows] == [0.0, 1.0, 2.0, 2.5, 3.0, 3.5, 4.5, 5.5, 6.5]
    with pytest.raises(ConfigError, match="--surge must be positive"):
        surged(trace, 0.0)
