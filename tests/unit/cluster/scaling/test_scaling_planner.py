"""The planner against loads with known needs: up within seconds, down after a minute, and never to and fro."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict

import pytest

from cluster.scaling.capacity import ExpectedLoad, MeasuredCapacity, RequestDemand, counts_for
from cluster.scaling.planner import FleetObservation, Planner, ScalingDecision
from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from twostroke.config import Bounds, ScalingConfig
from twostroke.scheduler.cost import StepCost

COST = StepCost(step_s=0.02, stream_s=0.0005, context_token_s=0.0, prompt_token_s=0.0002, prompt_step_s=0.001)
CAPACITY = MeasuredCapacity(cost=COST, step_tokens=512, decode_pool_tokens=60_000)
PROMISE = LatencyTargets(ttft_s=0.6, itl_s=0.03)
PROMPT, ANSWER = 1000, 100
PACE = ScalingConfig()


def planner(prefill: Bounds | None = None, decode: Bounds | None = None, *, may_switch: bool = True) -> Planner:
    wide = Bounds(least=1, most=16)
    return Planner(PROMISE, prefill or wide, decode or wide, PACE, may_switch=may_switch)


def drawn(draws: random.Random, mean: float) -> int:
    return max(1, int(draws.lognormvariate(0, 0.4) * mean))


def play(
    subject: Planner,
    rate: Callable[[float], float],
    seconds: int,
    *,
    begin: WorkerCounts,
    answer: Callable[[float], int] = lambda at_s: ANSWER,
    seed: int = 0,
) -> list[ScalingDecision]:
    """Poisson arrivals, a look every second; what is wanted is there at once."""
    draws = random.Random(seed)
    arrived, desired, outlooks, due_s = 0, begin, [], 0.0
    for second in range(1, seconds + 1):
        ended = []
        while due_s < second:
            due_s += draws.expovariate(rate(due_s))
            arrived += 1
            ended.append(RequestDemand(drawn(draws, PROMPT), 0, drawn(draws, answer(due_s))))
        seen = FleetObservation(
            at_s=float(second),
            arrived=arrived,
            ended=tuple(ended),
            capacity=CAPACITY,
            slots=64,
            serving=desired,
            desired=desired,
        )
        outlooks.append(subject.decide(seen))
        desired = outlooks[-1].wanted
    return outlooks


def need(rate: float, answer: int = ANSWER) -> WorkerCounts:
    demands = tuple(RequestDemand(PROMPT, 0, answer) for _ in range(8))
    return counts_for(ExpectedLoad(requests_per_s=rate, demands=demands), CAPACITY, PROMISE)


def need_as_drawn(rate: float) -> WorkerCounts:
    """With lengths that differ as those of `play` do."""
    draws = random.Random(0)
    demands = tuple(RequestDemand(drawn(draws, PROMPT), 0, drawn(draws, ANSWER)) for _ in range(96))
    return counts_for(ExpectedLoad(requests_per_s=rate, demands=demands), CAPACITY, PROMISE)


def test_a_load_that_doubles_gets_more_of_what_it_lacks_within_half_a_minute_and_loses_it_again() -> None:
    outlooks = play(planner(), lambda at_s: 16.0 if 120 <= at_s < 240 else 8.0, 480, begin=need(8.0))
    before, during, after = outlooks[119].wanted, outlooks[150].wanted, outlooks[-1].wanted
    assert during.prefill > before.prefill
    assert during.decode > before.decode
    assert during.prefill >= need(16.0).prefill
    assert after.total < during.total
    assert all(count <= most for count, most in zip(after.pair, need_as_drawn(12.0).pair, strict=True))
    assert "have been needed for" in next(each.why for each in outlooks[120:] if each.wanted != before)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", [3.0, 7.3])
def test_noise_of_a_steady_load_never_takes_a_worker_away_to_bring_it_back(rate: float, seed: int) -> None:
    wanted = [each.wanted for each in play(planner(), lambda _: rate, 450, begin=WorkerCounts(3, 4), seed=seed)]
    settled = wanted[150:]
    for counts in ([each.prefill for each in settled], [each.decode for each in settled]):
        steps = [after - before for before, after in itertools.pairwise(counts) if after != before]
        assert len(steps) <= 2, f"{rate} requests/s: {counts}"
        assert max(counts) - min(counts) <= 1


def test_bounds_hold_whatever_comes() -> None:
    bounds = Bounds(least=2, most=3)
    outlooks = play(planner(bounds, bounds), lambda at_s: 60.0 if at_s < 200 else 0.2, 500, begin=WorkerCounts(2, 2))
    counts = {count for each in outlooks for count in each.wanted.pair}
    assert counts == {2, 3}
    assert "unboundedly many streams" in str(outlooks[190])
    json.loads(json.dumps(asdict(outlooks[190]), allow_nan=False))


def test_longer_answers_are_the_decode_workers_business_and_prefill_workers_that_can_be_spared_help() -> None:
    def answer(at_s: float) -> int:
        return 20 if at_s < 150 else 400

    outlooks = play(planner(), lambda at_s: 12.0 if at_s < 120 else 4.0, 240, begin=need(12.0), answer=answer)
    changes = [(a.wanted, b.wanted) for a, b in itertools.pairwise(outlooks) if a.wanted != b.wanted]
    assert any(b.decode > a.decode and b.prefill < a.prefill for a, b in changes), changes
    apart = play(
        planner(may_switch=False), lambda at_s: 12.0 if at_s < 120 else 4.0, 240, begin=need(12.0), answer=answer
    )
    changes = [(a.wanted, b.wanted) for a, b in itertools.pairwise(apart) if a.wanted != b.wanted]
    assert not any(b.decode > a.decode and b.prefill < a.prefill for a, b in changes), changes


def test_no_worker_goes_that_a_quarter_more_running_streams_would_need() -> None:
    subject, counts = planner(), WorkerCounts(1, 3)
    for second in range(1, int(3 * PACE.down_s)):
        seen = FleetObservation(
            at_s=float(second),
            arrived=0,
            capacity=CAPACITY,
            slots=64,
            streams=36,  # 20 of them keep the promise beside each other
            stream_tokens=3600,
            serving=counts,
            desired=counts,
        )
        decision = subject.decide(seen)
    assert decision.need == WorkerCounts(1, 2)
    assert decision.wanted == counts


def test_promises_that_no_fleet_keeps_do_not_fill_the_bounds() -> None:
    wide = Bounds(least=1, most=16)
    subject = Planner(LatencyTargets(ttft_s=0.001, itl_s=0.001), wide, wide, PACE, may_switch=False)
    outlooks = play(subject, lambda _: 8.0, 120, begin=WorkerCounts(2, 2))
    assert max(outlooks[-1].wanted.pair) <= 4


def test_nothing_is_decided_before_the_load_is_known_or_where_counting_begins_anew() -> None:
    subject = planner()
    outlooks = play(subject, lambda _: 30.0, 4, begin=WorkerCounts(1, 1))
    assert {each.wanted for each in outlooks} == {WorkerCounts(1, 1)}
    seen = FleetObservation(
        at_s=5.0, arrived=0, capacity=CAPACITY, slots=64, serving=WorkerCounts(1, 1), desired=WorkerCounts(1, 1)
    )
    assert subject.decide(seen).need is None


def looked(
    subject: Planner, seconds: range, desired: WorkerCounts, rate: float = 0.0, first: int = 0, **facts: int
) -> WorkerCounts:
    """Plan as if each look told of `rate` requests, and of the facts; what is wanted is there at once."""
    for second in seconds:
        arrived = first + int(rate * (second - seconds.start))
        seen = FleetObservation(
            at_s=float(second), arrived=arrived, capacity=CAPACITY, slots=64, serving=desired, desired=desired, **facts
        )
        desired = subject.decide(seen).wanted
    return desired


def test_silence_of_a_minute_is_no_absence_of_load_afterwards_either() -> None:
    """Routers that began anew count from where they are."""
    subject = planner()
    before = play(subject, lambda _: 8.0, 120, begin=need(8.0))[-1].wanted
    arrived = subject._arrivals[-1][1]
    after = looked(subject, range(220, 226), before, 8.0, arrived)
    assert all(have >= had for have, had in zip(after.pair, before.pair, strict=True)), (before, after)


def test_where_nobody_ever_asked_the_least_will_do() -> None:
    assert looked(planner(), range(1, 60), WorkerCounts(4, 4)) == WorkerCounts(4, 4)
    assert looked(planner(), range(1, 80), WorkerCounts(4, 4)) == WorkerCounts(1, 1)


def test_where_nobody_asks_any_more_no_prefill_worker_is_kept_if_there_may_be_none() -> None:
    subject = planner(prefill=Bounds(least=0, most=16))
    before = play(subject, lambda _: 8.0, 120, begin=need(8.0))[-1].wanted
    assert before.prefill > 0
    after = looked(subject, range(121, 260), before, first=subject._arrivals[-1][1])
    assert after == WorkerCounts(0, 1)


def test_workers_are_added_though_that_takes_longer_than_removing_some() -> None:
    wide = Bounds(least=1, most=16)
    subject = Planner(PROMISE, wide, wide, ScalingConfig(up_s=90.0, down_s=60.0), may_switch=False)
    assert play(subject, lambda _: 16.0, 200, begin=WorkerCounts(1, 1))[-1].wanted.prefill > 1


def test_long_answers_keep_their_workers_though_nobody_asks_any_more() -> None:
    assert looked(planner(), range(1, 80), WorkerCounts(1, 4), streams=70, stream_tokens=30_000).decode == 4
    assert looked(planner(), range(1, 80), WorkerCounts(1, 4), streams=2, stream_tokens=130_000).decode == 3
    assert looked(planner(), range(1, 80), WorkerCounts(1, 4), streams=2, stream_tokens=1000).decode == 1


def test_a_queue_asks_for_more_but_not_while_those_who_will_clear_it_start() -> None:
    def after_a_queue(serving: WorkerCounts) -> int:
        subject = planner()
        begin = need(8.0)
        play(subject, lambda _: 8.0, 100, begin=begin)
        for second in range(101, 120):
            decision = subject.decide(
                FleetObservation(
                    at_s=float(second),
                    arrived=800 + 8 * (second - 100),
                    capacity=CAPACITY,
                    slots=64,
                    backlog_s=60.0,
                    serving=WorkerCounts(begin.prefill - (serving.prefill == 0), begin.decode),
                    desired=begin,
                )
            )
        return decision.wanted.prefill

    assert after_a_queue(WorkerCounts(1, 1)) > need(8.0).prefill
    assert after_a_queue(WorkerCounts(0, 1)) == need(8.0).prefill
