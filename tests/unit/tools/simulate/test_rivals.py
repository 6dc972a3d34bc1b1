"""Tests of where our policy stands among its rivals, on generated conversations: what is promised of it, five percent
looser.

Fixed seeds, at the pace at which round-robin keeps prefill workers 0.89 busy: it is offered a little more than they can
do, and part of that is still queued when the last request arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from cluster.values.worker_counts import LatencyTargets
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.loads import offered_in_turns
from tools.simulate.reports.summary import Summary, oracle_rate_of, summarise
from tools.simulate.runs import Trial, run_trial
from tools.simulate.traces.trace import Trace
from tools.simulate.traces.workloads import generated

pytestmark = pytest.mark.slow
OFFERED = 1.02
FLEET = FleetShape(prefill=4, decode=4, prefill_pages=1500, seed=1)
LOOSER = 1.05
Summarised = Callable[[str], Summary]


def summary_of(trial: Trial) -> Summary:
    run = run_trial(trial)
    return summarise(
        run, trial.rate_scale, LatencyTargets(ttft_s=None, itl_s=None), oracle_rate_of(trial.trace, trial.shape)
    )


@pytest.fixture(scope="module")
def conversations() -> Trace:
    return generated("conversation", 600, 1.7, seed=1)


@pytest.fixture(scope="module")
def under(conversations: Trace) -> Summarised:
    """A policy's summary; each runs once."""
    scale = OFFERED / offered_in_turns(conversations, FLEET)
    seen: dict[str, Summary] = {}

    def summarised(variant: str) -> Summary:
        if variant not in seen:
            seen[variant] = summary_of(Trial(variant=variant, trace=conversations, shape=FLEET, rate_scale=scale))
        return seen[variant]

    return summarised


def p90_s(summary: Summary) -> float:
    assert (summary.completed, summary.unequal_indexes) == (summary.requests, 0)
    assert summary.ttft_p90_s is not None
    return summary.ttft_p90_s


@pytest.mark.parametrize(
    ("rival", "most"),
    [
        ("round-robin", 0.10),
        ("least-requests", 0.40),
        ("sglang", 0.75),
        ("dynamo", 0.85),
        ("dynamo-sticky", 1.0),
    ],
)
def test_ours_has_the_earlier_first_tokens(under: Summarised, rival: str, most: float) -> None:
    ours, theirs = under("kv"), under(rival)
    assert p90_s(ours) <= LOOSER * most * p90_s(theirs)
    assert ours.itl_p99_s is not None
    assert theirs.itl_p99_s is not None
    assert ours.itl_p99_s <= 1.2 * theirs.itl_p99_s, "not paid for by running streams"


def test_round_robin_is_as_busy_as_was_asked_for(under: Summarised) -> None:
    assert 0.85 < under("round-robin").utilisation < 0.92


@pytest.mark.parametrize(("variant", "least"), [("kv", 0.95), ("kv-no-peers", 0.90)])
def test_nearly_all_that_one_shared_cache_would_find_is_found(under: Summarised, variant: str, least: float) -> None:
    found = under(variant).oracle_share
    assert found is not None
    assert found >= least / LOOSER


def test_first_tokens_come_when_they_were_predicted(under: Summarised) -> None:
    ours = under("kv")
    assert ours.prediction_error is not None
    assert ours.prediction_bias is not None
    assert ours.prediction_error < 0.15
    assert abs(ours.prediction_bias) < 0.05


def test_four_routers_place_as_well_as_one(under: Summarised, conversations: Trace) -> None:
    one = under("kv")
    fleet = dataclasses.replace(FLEET, routers=4)
    four = summary_of(Trial(variant="kv", trace=conversations, shape=fleet, rate_scale=one.rate_scale))
    assert p90_s(four) <= LOOSER * 1.10 * p90_s(one)


def test_prefixes_of_peers_shorten_the_queue() -> None:
    """Shared prefixes under a load that no single holder could bear."""
    groups = generated("prefix-groups", 350, 12.0, seed=1)
    with_peers, alone = (
        summary_of(Trial(variant=variant, trace=groups, shape=FLEET)) for variant in ("kv", "kv-no-peers")
    )
    assert p90_s(with_peers) <= LOOSER * 0.9 * p90_s(alone)
    assert with_peers.pulled_tokens > 0
    assert alone.pulled_tokens == 0
