"""Simulated workers that come and go as a script says, while they are used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from router.routing.policies import RECONSIDERING, policy_named
from tests.unit.tools.simulate.fleet.fleets import SMALL, row, trace
from tools.simulate.fleet.results import Status
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.scaling import FleetReport
from tools.simulate.fleet.simulation import simulate
from twostroke.config import Role


class Script:
    """(prefill, decode) at each report; the last one stays."""

    tick_s, start_s, switch_s = 1.0, 1.0, 0.5

    def __init__(self, begin: tuple[int, int], then: Sequence[tuple[int, int]]) -> None:
        self.begin = by_role(begin)
        self._then = iter(then)
        self._last = begin
        self.seen: list[FleetReport] = []

    def __call__(self, report: FleetReport) -> dict[Role, int]:
        self.seen.append(report)
        self._last = next(self._then, self._last)
        return by_role(self._last)


def by_role(counts: tuple[int, int]) -> dict[Role, int]:
    return dict(zip((Role.PREFILL, Role.DECODE), counts, strict=True))


@pytest.mark.parametrize(
    ("begin", "then"),
    [
        pytest.param((1, 2), [(1, 1), (1, 2)], id="one that still leaves is wanted again"),
        pytest.param((1, 2), [(2, 1), (1, 2)], id="one that still switches shall stay what it was"),
        pytest.param((2, 2), [(2, 1), (1, 2), (1, 1), (2, 2)], id="and all of it"),
    ],
)
def test_who_is_wanted_again_before_it_has_left_comes_back(
    begin: tuple[int, int], then: Sequence[tuple[int, int]]
) -> None:
    script = Script(begin, then)
    rows = [row(0.1 * at, 100, 400, chat=at) for at in range(8)] + [row(30.0, 100, 10, chat=9)]
    name = next(iter(RECONSIDERING))
    run = simulate(trace(rows), SMALL, RoutingSetup(name, lambda: policy_named(name), holds=True), script)
    assert len(run.of_status(Status.DONE)) == len(rows)
    assert script.seen[-1].serving == by_role(then[-1])
    assert not math.isnan(run.worker_s)
