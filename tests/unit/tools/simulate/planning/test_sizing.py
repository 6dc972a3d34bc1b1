"""The smallest fleet, and where splitting pays, in worlds where a formula says so."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from tests.unit.tools.simulate.fleets import Recording, even_trace, run_of
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.planning import sizing
from tools.simulate.planning.plan import answer, pays
from tools.simulate.planning.sizing import LoadPoint, crossing, crossover, smallest_fleet, splits_near, splits_of
from tools.simulate.runs import Trial
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepCost

SHAPE = FleetShape(prefill=4, decode=4, cost=StepCost(step_s=0.01, stream_s=1e-3, prompt_token_s=1e-4))
TRACE = even_trace(gap_s=0.25)
PROMISE = LatencyTargets(ttft_s=2.0, itl_s=0.05)


def world(prefill: int, decode: int) -> Recording:
    """Enough is at least that many of each role."""

    def formula(trial: Trial) -> SimulatedRun:
        ttft_s = 1.0 if trial.shape.prefill >= prefill else 9.0
        itl_s = 0.02 if trial.shape.decode >= decode else 0.2
        return run_of(trial, ttft_s, 0.5, itl_s)

    return Recording(formula)


@pytest.mark.parametrize("needed", [(1, 1), (2, 2), (3, 1), (4, 5), (9, 2)])
def test_the_smallest_fleet_is_found_from_above_and_from_below(needed: tuple[int, int]) -> None:
    fleet = world(*needed)
    sizing = smallest_fleet(TRACE, SHAPE, PROMISE, fleet)
    assert sizing.smallest == WorkerCounts(*needed)
    tried = [WorkerCounts(trial.shape.prefill, trial.shape.decode) for trial in fleet.trials]
    assert len(tried) == len(set(tried)), "no fleet runs twice"
    assert answer(sizing).startswith(f"needs {needed[0]} prefill + {needed[1]} decode workers")


def test_a_promise_that_never_holds_ends_the_search() -> None:
    with pytest.raises(ConfigError, match=r"still miss the promise: 0% of first tokens and 100% of answers"):
        smallest_fleet(TRACE, SHAPE, PROMISE, world(10_000, 1))


def test_smaller_totals_are_split_as_the_larger_one_was() -> None:
    assert splits_near(WorkerCounts(6, 2), 7) == [WorkerCounts(5, 2), WorkerCounts(6, 1), WorkerCounts(4, 3)]
    assert splits_near(WorkerCounts(1, 1), 1) == []
    assert splits_of(8, WorkerCounts(4, 4)) == [
        WorkerCounts(2, 6),
        WorkerCounts(3, 5),
        WorkerCounts(4, 4),
        WorkerCounts(5, 3),
        WorkerCounts(6, 2),
    ]
    assert splits_of(2, WorkerCounts(1, 1)) == [WorkerCounts(1, 1)]


def test_splits_are_compared_with_as_many_workers_that_do_both() -> None:
    fleet = Recording(lambda trial: run_of(trial, 1.0 if trial.shape.prefill == 3 else 9.0, 0.5))
    (point,) = crossover(TRACE, SHAPE, PROMISE, [2.0], fleet)
    assert {trial.shape.prefill + trial.shape.decode for trial in fleet.trials} == {8}
    assert {trial.rate_scale for trial in fleet.trials} == {2.0}
    assert point.best[0] == WorkerCounts(3, 5)
    assert point.colocated == 0.0
    assert point.requests_per_s == pytest.approx(2 * 100 / (99 * 0.25))


def point(rate: float, split: float, colocated: float) -> LoadPoint:
    return LoadPoint(
        rate_scale=rate, requests_per_s=rate, goodput={WorkerCounts(0, 4): colocated, WorkerCounts(2, 2): split}
    )


def test_the_crossing_lies_where_the_lead_changes() -> None:
    points = [point(1.0, 1.0, 1.0), point(2.0, 1.8, 2.0), point(4.0, 4.0, 3.4), point(6.0, 6.0, 5.0)]
    assert crossing(points) == (pytest.approx(2.5), True)
    assert pays(points) == "splitting pays above 2.50 requests/s"
    assert pays([point(1.0, 2.0, 1.0), point(2.0, 1.0, 2.0)]) == "splitting pays below 1.50 requests/s"
    assert pays([point(1.0, 2.0, 1.0), point(2.0, 2.0, 2.0)]) == "splitting pays at any of these loads"
    assert pays([point(1.0, 0.5, 1.0)]) == "splitting does not pay at any of these loads"
    assert pays([point(1.0, 1.0, 1.0)]) == "splitting makes no difference at any of these loads"


@pytest.mark.parametrize("needed", [(40, 30), (7, 60), (1, 1)])
def test_a_formula_that_is_far_off_is_corrected_in_few_steps(needed: tuple[int, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(sizing, "counts_for", lambda *_: WorkerCounts(100, 100))
    fleet = world(*needed)
    found = smallest_fleet(TRACE, SHAPE, PROMISE, fleet)
    assert len(fleet.trials) <= 60
    assert found.smallest.prefill >= needed[0]
    assert found.smallest.decode >= needed[1]


def test_a_load_that_no_simulated_fleet_carries_is_refused_before_anything_runs() -> None:
    fleet = world(1, 1)
    with pytest.raises(ConfigError, match=r"needs \d+ prefill \+ \d+ decode workers by formula"):
        smallest_fleet(even_trace(gap_s=1e-3), SHAPE, PROMISE, fleet)
    with pytest.raises(ConfigError, match="one worker of each role is enough"):
        smallest_fleet(even_trace(gap_s=1e4), SHAPE, PROMISE, fleet)
    assert not fleet.trials
