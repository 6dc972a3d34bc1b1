"""Paces found by search: the one that keeps workers busy as asked, and the one at which a promise breaks."""

from __future__ import annotations

import pytest

from tests.unit.tools.simulate.fleets import Recording, even_trace, run_of
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.loads import SATURATED, highest_rates, offered_in_turns, pace_at
from tools.simulate.runs import Trial, paced
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepCost

SHAPE = FleetShape(prefill=2, decode=2, cost=StepCost(step_s=0.01, prompt_token_s=1e-4))
TRIAL = Trial(variant="round-robin", trace=even_trace(), shape=SHAPE)
OWN_RATE = 100 / 99


def test_what_is_offered_is_work_over_workers() -> None:
    assert offered_in_turns(TRIAL.trace, SHAPE) == pytest.approx(100 * 0.512 / (2 * 99))


def test_a_pace_is_corrected_until_it_keeps_workers_as_busy_as_asked() -> None:
    fleet = Recording(lambda trial: run_of(trial, 1.0, 0.2 * trial.rate_scale))
    assert 0.2 * pace_at(0.8, TRIAL, fleet) == pytest.approx(0.8, rel=0.01)
    assert len(fleet.trials) == 2, "the first guess, and its correction"


def test_beyond_saturation_the_formula_stands_alone() -> None:
    fleet = Recording(lambda trial: run_of(trial, 1.0, 0.99))
    scale = pace_at(SATURATED + 0.1, TRIAL, fleet)
    assert scale == pytest.approx((SATURATED + 0.1) / offered_in_turns(TRIAL.trace, SHAPE))
    assert not fleet.trials


def test_a_policy_that_leaves_prefill_workers_idle_has_no_such_pace() -> None:
    with pytest.raises(ConfigError, match="keeps prefill workers idle"):
        pace_at(0.5, TRIAL, Recording(lambda trial: run_of(trial, 1.0, 0.0)))
    with pytest.raises(ConfigError, match="--prefill must be 1 or more"):
        offered_in_turns(TRIAL.trace, FleetShape(prefill=0))


def test_the_highest_rates_of_all_policies_are_searched_side_by_side() -> None:
    limits = {"round-robin": 1.7, "kv": 6.0}
    fleet = Recording(lambda t: run_of(t, 9.0 if t.rate_scale * OWN_RATE > limits[t.variant] else 1.0, 0.5))
    trials = [TRIAL, Trial(variant="kv", trace=TRIAL.trace, shape=SHAPE)]
    found = highest_rates(trials, 5.0, 0.05, fleet)
    for each in found:
        assert each.keeps is not None
        assert each.breaks is not None
        assert each.keeps <= limits[each.variant] <= each.breaks <= 1.06 * each.keeps
        assert (each.p90_s, each.utilisation) == (1.0, pytest.approx(0.5))
    assert len(fleet.batches[0]) == 2
    assert len({(trial.variant, trial.rate_scale) for trial in fleet.trials}) == len(fleet.trials), "nothing runs twice"


def test_a_promise_that_breaks_at_every_rate_has_none() -> None:
    (found,) = highest_rates([TRIAL], 5.0, 0.05, Recording(lambda trial: run_of(trial, 9.0, 0.5)))
    assert (found.keeps, found.p90_s, found.utilisation) == (None, None, None)


def test_a_faster_pace_is_the_same_requests_sooner() -> None:
    fast = paced(TRIAL.trace, 4.0)
    assert fast.rows[-1].timestamp_s == 99 / 4
    assert [row.blocks for row in fast.rows] == [row.blocks for row in TRIAL.trace.rows]
    assert paced(TRIAL.trace, 1.0) is TRIAL.trace
