"""Runs in processes of their own come back in order, and as they would have been here."""

from __future__ import annotations

import dataclasses

from tests.unit.tools.simulate.fleets import even_trace
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.runs import Trial, runner

FLEET = FleetShape(prefill=1, decode=1)


def without_clocks(run: SimulatedRun) -> SimulatedRun:
    return dataclasses.replace(run, cpu_s=0.0, decision_cpu_s=0.0)


def test_a_run_is_the_same_in_another_process() -> None:
    trace = even_trace(requests=8)
    trials = [Trial(variant=variant, trace=trace, shape=FLEET, rate_scale=4.0) for variant in ("kv", "round-robin")]
    with runner(1) as alone, runner(2) as parallel:
        here, elsewhere, again = alone(trials), parallel(trials), parallel(trials[::-1])
    assert [run.policy for run in elsewhere] == ["kv", "round-robin"]
    assert list(map(without_clocks, here)) == list(map(without_clocks, elsewhere))
    assert list(map(without_clocks, here)) == list(map(without_clocks, again[::-1]))
