"""The planner over a simulated fleet: it follows a surge, costs less than all workers, and answers everybody."""

from __future__ import annotations

import pytest

from cluster.planner import Promise
from cluster.simulate.scale import compared, surged
from tests.unit.cluster.simulate.fleets import even_trace
from twostroke.errors import ConfigError
from twostroke.scaling_config import ScalingConfig
from twostroke.simulate.fleet import FleetShape


def test_a_surge_is_followed_up_and_down_for_less_than_all_workers_cost() -> None:
    trace = surged(even_trace(requests=180, tokens=5120, gap_s=1.0), 3.0)
    shape = FleetShape(prefill=1, decode=1)
    promise, pace = Promise(ttft_s=1.5, itl_s=0.05), ScalingConfig(max_prefill=4, down_s=30.0)
    planned, (scaled, small, all_of_them) = compared(trace, shape, promise, pace, start_s=5.0)
    assert scaled.not_answered == small.not_answered == all_of_them.not_answered == 0
    assert small.worker_s < scaled.worker_s < all_of_them.worker_s
    assert small.attainment < scaled.attainment
    counts = [outlook.wanted.prefill for _, outlook in planned.history]
    assert max(counts) > 1
    assert counts[-1] < max(counts)


def test_a_surge_keeps_the_order_and_the_pace_outside_the_middle_third() -> None:
    trace = surged(even_trace(requests=9), 2.0)
    assert [row.timestamp_s for row in trace.rows] == [0.0, 1.0, 2.0, 2.5, 3.0, 3.5, 4.5, 5.5, 6.5]
    with pytest.raises(ConfigError, match="--surge must be positive"):
        surged(trace, 0.0)
