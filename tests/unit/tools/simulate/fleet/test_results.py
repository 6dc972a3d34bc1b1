"""What is read off a run."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tools.simulate.fleet.results import (
    EventUse,
    Gaps,
    RequestOutcome,
    SimulatedRun,
    Status,
    attainment,
    goodput,
    meets,
    percentile,
    prediction_errors,
    token_hit_rate,
    utilisation,
)
from twostroke.config import Role

DONE = RequestOutcome(
    index=0,
    status=Status.DONE,
    arrived_s=1.0,
    prompt_tokens=100,
    output_tokens=3,
    ttft_s=0.5,
    finished_s=1.7,
    itl_mean_s=0.1,
    cached_tokens=40,
    decided_s=1.1,
    predicted_ttft_s=0.5,
)
REFUSED = RequestOutcome(
    index=1, status=Status.REFUSED, arrived_s=2.0, prompt_tokens=900, output_tokens=0, finished_s=2.0
)


def a_run(*outcomes: RequestOutcome) -> SimulatedRun:
    return SimulatedRun(
        policy="kv",
        outcomes=outcomes,
        workers=(),
        events=EventUse(),
        gaps=Gaps(),
        span_s=10.0,
        duration_s=20.0,
        decisions=2,
        decision_cpu_s=0.0,
        cpu_s=0.0,
    )


def test_percentiles_lie_between_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.9) == 9.0
    assert percentile([], 0.5) is None


def test_gaps_are_known_within_two_percent() -> None:
    gaps = [0.01 + 0.0001 * number for number in range(1000)]
    counted = Gaps(Counter(map(Gaps.bucket_of, gaps)))
    assert counted.tokens == 1000
    for share in (0.01, 0.5, 0.99):
        assert counted.percentile(share) == pytest.approx(percentile(gaps, share), rel=0.03)
    assert Gaps().percentile(0.5) is None


def test_only_answers_in_time_are_good() -> None:
    assert meets(DONE, None, None)
    assert meets(DONE, 0.5, 0.1)
    assert not meets(DONE, 0.4, None)
    assert not meets(DONE, None, 0.05)
    assert not meets(REFUSED, None, None)
    done = a_run(DONE, REFUSED)
    assert goodput(done, 1.0, None) == 1 / 20
    assert attainment(done, 1.0, None) == 0.5


def test_hits_are_counted_over_answered_requests() -> None:
    assert token_hit_rate(a_run(DONE, REFUSED)) == 0.4


def test_a_prediction_is_held_against_the_time_since_it_was_made() -> None:
    assert prediction_errors([DONE, REFUSED]) == [pytest.approx(0.25)]


def test_nobody_is_utilised_where_nobody_is() -> None:
    assert utilisation(dataclasses.replace(a_run(), workers=()), Role.DECODE) == 0.0
