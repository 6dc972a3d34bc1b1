"""Counts of workers for a load: against queues whose answers are known, and in the direction that every change goes."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.scaling.capacity import (
    ExpectedLoad,
    MeasuredCapacity,
    RequestDemand,
    attainment_of,
    counts_for,
    streams_per_worker,
)
from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepCost

COST = StepCost(step_s=0.02, stream_s=1e-3, prompt_token_s=1e-4)
CAPACITY = MeasuredCapacity(cost=COST, step_tokens=4096, decode_pool_tokens=500_000)
LOAD = ExpectedLoad(requests_per_s=5.0, demands=(RequestDemand(10_000, 0, 200),))
"""A second of prefill each."""
PROMISE = LatencyTargets(ttft_s=3.0, itl_s=0.05)


def test_a_single_server_waits_as_a_queue_with_constant_service_does() -> None:
    """M/D/1 at half load: a mean wait of half a service time, and half of all arrivals wait at all."""
    load = dataclasses.replace(LOAD, requests_per_s=0.5)
    assert attainment_of(1, load, CAPACITY, 1.0) == pytest.approx(0.5)
    assert attainment_of(1, load, CAPACITY, 2.0) == pytest.approx(1 - 0.5 * 2.718281828**-1)
    assert attainment_of(1, load, CAPACITY, 0.9) == 0.0, "its own second is not to be had for less"


def test_a_load_above_the_workers_keeps_no_promise() -> None:
    assert attainment_of(5, LOAD, CAPACITY, 100.0) == 0.0
    assert attainment_of(6, LOAD, CAPACITY, 100.0) > 0.99


def test_streams_are_those_that_arrive_during_an_answer() -> None:
    streams = streams_per_worker(2, LOAD, CAPACITY)
    assert streams is not None
    step_s = COST.step_s + streams * COST.stream_s
    assert streams == pytest.approx(LOAD.requests_per_s / 2 * 200 * step_s)
    assert streams_per_worker(1, dataclasses.replace(LOAD, requests_per_s=6.0), CAPACITY) is None


@pytest.mark.parametrize(
    "harder",
    [
        (dataclasses.replace(LOAD, requests_per_s=20.0), PROMISE),
        (LOAD, dataclasses.replace(PROMISE, ttft_s=1.1)),
        (LOAD, dataclasses.replace(PROMISE, itl_s=0.023)),
        (LOAD, dataclasses.replace(PROMISE, attainment=0.999)),
        (dataclasses.replace(LOAD, demands=(RequestDemand(10_000, 0, 200), RequestDemand(25_000, 0, 900))), PROMISE),
    ],
)
def test_more_load_and_tighter_promises_need_more_workers(harder: tuple[ExpectedLoad, LatencyTargets]) -> None:
    counts = counts_for(LOAD, CAPACITY, PROMISE)
    more = counts_for(harder[0], CAPACITY, harder[1])
    assert more.total > counts.total
    assert more.prefill >= counts.prefill
    assert more.decode >= counts.decode


def test_what_is_cached_needs_no_worker() -> None:
    cached = dataclasses.replace(LOAD, demands=(RequestDemand(5_000, 5_000, 200),))
    assert counts_for(cached, CAPACITY, PROMISE).prefill < counts_for(LOAD, CAPACITY, PROMISE).prefill


def test_streams_that_do_not_fit_into_the_pool_need_more_decode_workers() -> None:
    small = dataclasses.replace(CAPACITY, decode_pool_tokens=60_000)
    assert counts_for(LOAD, small, PROMISE).decode > counts_for(LOAD, CAPACITY, PROMISE).decode


def test_without_promises_the_fewest_that_keep_up_are_enough() -> None:
    assert counts_for(LOAD, CAPACITY, LatencyTargets(ttft_s=None, itl_s=None)) == WorkerCounts(6, 2)


def test_a_promise_that_no_fleet_keeps_is_refused_with_what_an_empty_one_takes() -> None:
    with pytest.raises(ConfigError, match=r"more than 1 s to their first token on an empty one") as raised:
        counts_for(LOAD, CAPACITY, LatencyTargets(ttft_s=0.9, itl_s=None))
    assert raised.value.field == "slo_ttft"
    with pytest.raises(ConfigError, match=r"a step with one stream takes 0\.021 s") as raised:
        counts_for(LOAD, CAPACITY, LatencyTargets(ttft_s=None, itl_s=0.01))
    assert raised.value.field == "slo_itl"
    with pytest.raises(ConfigError, match="--attainment"):
        LatencyTargets(ttft_s=1.0, itl_s=None, attainment=1.0)
    with pytest.raises(ConfigError, match="--slo-ttft"):
        LatencyTargets(ttft_s=0.0, itl_s=None)
