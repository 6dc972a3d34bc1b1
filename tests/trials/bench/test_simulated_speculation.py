"""The gain that the bench of speculation predicts is the one that its counts and costs say."""

from __future__ import annotations

import pytest

from tests.trials.bench.simulated_speculation import CalibratedFleet, DraftCounts, simulated_token_s
from twostroke.rpc.v1.control_pb2 import Load, StepCosts

STEP_S, ROW_S, BETWEEN_S = 0.018, 0.002, 0.001
COSTS = StepCosts(step_s=STEP_S, stream_s=ROW_S, prompt_token_s=1e-3, step_tokens=512, step_target_s=0.2)
LOAD = Load(costs=COSTS, pages_total=2000)
STEPS = 1000
COUNTS = DraftCounts(drafted=(700, 500, 400, 300, 800, 0, 0), kept=(600, 400, 300, 200, 400, 0, 0))
"""Drafted tokens by place in so many steps of streams, and those that were right."""
LENGTH = 400


def test_counts_are_shares_of_the_steps_that_made_the_tokens_known() -> None:
    before = DraftCounts(drafted=(10,) * 7, kept=(5,) * 7)
    later = DraftCounts(tuple(n + 10 for n in COUNTS.drafted), tuple(n + 5 for n in COUNTS.kept))
    assert later.since(before) == COUNTS
    shape = COUNTS.shape(int(STEPS + sum(COUNTS.kept)))
    assert shape.proposed[:9] == pytest.approx((0.7, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2, 0.0))
    assert shape.right[:9] == pytest.approx((0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.0))
    shape.check()


def test_the_simulated_time_per_token_is_what_costs_and_counts_say() -> None:
    fleet = CalibratedFleet(LOAD, [LOAD, LOAD], BETWEEN_S)
    kept, drafted = sum(COUNTS.kept), sum(COUNTS.drafted)
    drafting = simulated_token_s(fleet, COUNTS.shape(int(STEPS + kept)), [100], LENGTH)
    plain = simulated_token_s(fleet, None, [100], LENGTH)
    assert plain == pytest.approx(STEP_S + BETWEEN_S + ROW_S, rel=0.01)
    expected = (STEP_S + BETWEEN_S + ROW_S * (1 + drafted / STEPS)) / (1 + kept / STEPS)
    assert drafting == pytest.approx(expected, rel=0.05)
