"""A simulated fleet: times that can be worked out by hand, nothing lost, the same again with the same seed."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.tools.simulate.fleet.fleets import BLOCK, COST, SMALL, chats, row, run, trace
from tools.simulate.fleet.results import (
    SimulatedRun,
    Status,
    percentile,
    tier_hit_rate,
    token_hit_rate,
    ttfts,
    utilisation,
)
from tools.simulate.fleet.shape import Death, Delays, Faults, FleetShape, TierShape
from tools.simulate.fleet.worker import steps
from tools.simulate.fleet.worker.pulls import Converter
from twostroke.base.errors import ConfigError
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.config import Role
from twostroke.kv_cache.tier import Tier

PAIR = dataclasses.replace(SMALL, prefill=1, decode=1)
DELAYS = Delays()


def page_s(shape: FleetShape = PAIR) -> float:
    return shape.page_bytes / shape.link_bytes_per_s


def way_s() -> float:
    """Returns the seconds that a request and its first token travel, without computing or copying anything."""
    return DELAYS.frontend_s + DELAYS.open_s + 2 * DELAYS.pull_s + DELAYS.token_s


def tail_s(context_tokens: int, tail_tokens: int) -> float:
    return COST.of_streams(1, context_tokens) + COST.of_prompt(tail_tokens - 1, context_tokens - tail_tokens, 64)


def test_a_first_token_comes_after_prefill_copy_and_tail() -> None:
    done = run(trace([row(0.0, 3 * BLOCK + 5, 4, 0)]), PAIR, "round-robin").outcomes[0]
    expected_s = way_s() + COST.of_prompt(3 * BLOCK, 0, 64) + 3 * page_s() + tail_s(3 * BLOCK + 5, 5)
    assert done.status is Status.DONE
    assert done.ttft_s == pytest.approx(expected_s)
    assert (done.cached_tokens, done.source, done.decode) == (0, "prefill-0", "decode-0")
    assert done.predicted_ttft_s == pytest.approx(expected_s, rel=0.25)


def test_tokens_come_one_step_apart() -> None:
    done = run(trace([row(0.0, 3 * BLOCK + 5, 30, 0)]), PAIR, "round-robin").outcomes[0]
    assert done.ttft_s is not None
    contexts = [3 * BLOCK + 5 + answered for answered in range(1, 30)]
    steps = [COST.of_streams(1, context) for context in contexts]
    assert done.finished_s == pytest.approx(done.arrived_s + done.ttft_s + sum(steps))
    assert done.itl_mean_s == pytest.approx(sum(steps) / 29)
    assert done.itl_max_s == pytest.approx(steps[-1])


def test_prompts_wait_for_those_that_came_before_them() -> None:
    """Two prompts of one full step each."""
    rows = [row(0.0, 64 + 3, 1, 0), row(0.0, 64 + 3, 1, 1)]
    first, second = run(trace(rows), PAIR, "round-robin").outcomes
    assert first.ttft_s is not None
    assert second.ttft_s == pytest.approx(first.ttft_s + COST.of_prompt(64, 0, 64), rel=0.02)


def test_a_prompt_seen_before_is_found_where_it_is_kept() -> None:
    rows = [row(0.0, 4 * BLOCK + 2, 2, 0), row(5.0, 4 * BLOCK + 2, 2, 0)]
    first, again = run(trace(rows), PAIR, "round-robin").outcomes
    assert first.ttft_s is not None
    assert again.cached_tokens == 4 * BLOCK
    expected_s = DELAYS.frontend_s + DELAYS.open_s + DELAYS.token_s + tail_s(4 * BLOCK + 2, 2)
    assert again.ttft_s == pytest.approx(expected_s)


def test_a_prefix_on_another_worker_is_pulled_from_there() -> None:
    shape = dataclasses.replace(SMALL, page_bytes=10)
    burst = [row(3 + index * 0.001, 20 * BLOCK + 2, 2, index % 2, shared=18) for index in range(12)]
    done = run(trace([row(0.0, 20 * BLOCK + 2, 2, 9, shared=18), *burst]), shape)
    assert any(outcome.peer is not None and outcome.pulled_tokens for outcome in done.outcomes)
    assert all(outcome.pulled_tokens <= outcome.cached_tokens for outcome in done.outcomes)


@pytest.mark.parametrize("policy", ["round-robin", "kv"])
def test_every_prompt_token_is_computed_or_found(policy: str) -> None:
    """Each answer's last prompt token runs with its first sample."""
    done = run(chats(), SMALL, policy)
    assert {outcome.status for outcome in done.outcomes} == {Status.DONE}
    missed = sum(outcome.prompt_tokens - outcome.cached_tokens for outcome in done.outcomes)
    assert sum(use.prompt_tokens for use in done.workers) + len(done.outcomes) == missed
    assert sum(use.output_tokens for use in done.workers) == sum(outcome.output_tokens for outcome in done.outcomes)
    assert done.gaps.tokens == sum(outcome.output_tokens - 1 for outcome in done.outcomes)
    assert sum(use.served_pages for use in done.workers) == sum(use.pulled_pages for use in done.workers) > 0
    assert done.unequal_indexes == ()
    assert 0.05 < utilisation(done) + utilisation(done, Role.DECODE) < 2


def test_knowing_what_is_cached_helps() -> None:
    blind, knowing = (run(chats(120), SMALL, policy) for policy in ("round-robin", "kv"))
    assert 1 - token_hit_rate(knowing) < 0.65 * (1 - token_hit_rate(blind))
    assert _p90(knowing) < _p90(blind)


def test_a_seed_is_a_run() -> None:
    shape = dataclasses.replace(SMALL, noise=0.3, delays=Delays(event_jitter_s=0.01), seed=4)
    outcomes = run(chats(40), shape).outcomes
    assert run(chats(40), shape).outcomes == outcomes
    assert run(chats(40), dataclasses.replace(shape, seed=5)).outcomes != outcomes


def test_steps_taken_at_once_are_steps_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = run(chats(60))
    monkeypatch.setattr(steps, "repeats", lambda step, block_size: 0)
    one_by_one = run(chats(60))
    assert sum(use.steps for use in at_once.workers) == sum(use.steps for use in one_by_one.workers)
    for fast, slow in zip(at_once.outcomes, one_by_one.outcomes, strict=True):
        assert (fast.decode, fast.source, fast.cached_tokens) == (slow.decode, slow.source, slow.cached_tokens)
        assert fast.ttft_s == pytest.approx(slow.ttft_s)
        assert fast.finished_s == pytest.approx(slow.finished_s)
        assert fast.itl_max_s == pytest.approx(slow.itl_max_s)
    assert at_once.gaps.percentile(0.99) == pytest.approx(one_by_one.gaps.percentile(0.99), rel=0.03)


def test_host_memory_keeps_what_the_device_forgets() -> None:
    small = dataclasses.replace(SMALL, prefill_pages=60, decode_pages=60)
    tiered = dataclasses.replace(small, tiers=TierShape(host_bytes=400 * small.page_bytes, host_page_s=1e-4))
    without, with_tier = run(chats(160), small), run(chats(160), tiered)
    assert token_hit_rate(with_tier) > token_hit_rate(without) + 0.05
    assert tier_hit_rate(with_tier, Tier.HOST) > 0.05 > tier_hit_rate(with_tier, Tier.DISK) == 0
    assert with_tier.unequal_indexes == ()


def test_a_disk_keeps_what_the_device_forgets_over_the_death_of_its_worker() -> None:
    small = dataclasses.replace(SMALL, prefill=0, decode=1, decode_pages=60)
    death = Death(worker=WorkerId("decode-0"), at_s=20.0, back_at_s=20.5)
    dying = dataclasses.replace(small, faults=Faults(deaths=(death,)))
    tiers = TierShape(disk_bytes=4 << 20, disk_page_s=1e-3)
    without, with_disk = (run(chats(160), dataclasses.replace(dying, tiers=each)) for each in (TierShape(), tiers))
    assert token_hit_rate(with_disk) > token_hit_rate(without) + 0.05
    assert tier_hit_rate(with_disk, Tier.DISK) > 0.05
    assert with_disk.unequal_indexes == ()


def test_a_disk_that_is_slower_than_computing_is_not_waited_for() -> None:
    small = dataclasses.replace(SMALL, prefill_pages=120, decode_pages=120)
    slow = TierShape(disk_bytes=4 << 20, disk_page_s=0.2)
    without, with_disk = run(chats(120), small), run(chats(120), dataclasses.replace(small, tiers=slow))
    assert tier_hit_rate(with_disk, Tier.DISK) == 0
    assert _p90(with_disk) < 1.1 * _p90(without)


@pytest.mark.slow
def test_a_budget_of_written_bytes_bounds_what_a_disk_gets() -> None:
    small = dataclasses.replace(SMALL, prefill_pages=60, decode_pages=60)
    rates = [
        tier_hit_rate(
            run(
                chats(160),
                dataclasses.replace(
                    small, tiers=TierShape(disk_bytes=4 << 20, disk_page_s=1e-4, disk_write_bytes_per_s=budget)
                ),
            ),
            Tier.DISK,
        )
        for budget in (2e3, 1e8)
    ]
    assert rates[0] < 0.5 * rates[1]


def test_an_idle_decode_worker_takes_prompts_over_from_a_busy_source() -> None:
    burst = trace([row(0.001 * index, 20 * BLOCK + 3, 1, index) for index in range(8)])
    waits, shares = (
        run(burst, PAIR, "round-robin"),
        run(burst, dataclasses.replace(PAIR, local_prefill=True), "round-robin"),
    )
    assert {use.worker: use.prompt_tokens for use in waits.workers}["decode-0"] == 8 * 2
    assert {use.worker: use.prompt_tokens for use in shares.workers}["decode-0"] >= 2 * 20 * BLOCK
    assert max(ttfts(shares)) < 0.8 * max(ttfts(waits))


def test_takeovers_lose_nothing() -> None:
    done = run(chats(150, every_s=0.03), dataclasses.replace(SMALL, local_prefill=True, noise=0.2), "round-robin")
    assert {outcome.status for outcome in done.outcomes} == {Status.DONE}
    assert done.unequal_indexes == ()


def test_answers_that_outgrow_the_pool_are_preempted_and_finish() -> None:
    tight = dataclasses.replace(PAIR, decode_pages=14)
    done = run(trace([row(0.01 * index, 4 * BLOCK + 1, 60, index) for index in range(3)]), tight, "round-robin")
    assert [outcome.output_tokens for outcome in done.outcomes] == [60, 60, 60]
    assert sum(use.preemptions for use in done.workers) > 0


def test_who_would_be_too_late_is_refused_and_told_when_to_come_back() -> None:
    slo = dataclasses.replace(SMALL, slo_ttft_s=1.0)
    done = run(chats(200, every_s=0.02), slo)
    refused = done.of_status(Status.REFUSED)
    assert refused
    assert len(refused) + len(done.of_status(Status.DONE)) == 200
    assert all(outcome.retry_after_s is not None and outcome.retry_after_s > 0 for outcome in refused)
    # Requests that wait for a decode worker's pages come later than predicted: they are not among its queued tokens.
    assert _p90(done) < 1.5


def test_a_trace_with_other_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 16 tokens"):
        run(chats(), dataclasses.replace(SMALL, block_size=32))


def test_a_fleet_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode of 1 or more"):
        FleetShape(decode=0)
    with pytest.raises(ConfigError, match="routers of 1 or more"):
        FleetShape(routers=0)
    with pytest.raises(ConfigError, match="slo_ttft_s must be positive"):
        FleetShape(slo_ttft_s=0.0)
    with pytest.raises(ConfigError, match="link_bytes_per_s must be positive"):
        FleetShape(link_bytes_per_s=float("nan"))
    with pytest.raises(ConfigError, match="noise of 0 or more"):
        FleetShape(noise=-1.0)
    with pytest.raises(ConfigError, match="event_drop must be a share"):
        Faults(event_drop=1.0)


def _p90(done: SimulatedRun) -> float:
    value = percentile(ttfts(done), 0.9)
    assert value is not None
    return value


def test_conversions_delay_first_tokens_by_what_they_take_once_for_each_page() -> None:
    """A prompt is asked for again when its pages are converted, and its decode worker has forgotten them."""

    def first_tokens(conversion_page_s: float) -> list[float]:
        shape = dataclasses.replace(
            SMALL, prefill=1, decode=1, decode_pages=40, prefill_page_bytes=1900, conversion_page_s=conversion_page_s
        )
        rows = [row(0.0, 520, 4, 0), row(5.0, 520, 4, 1), row(10.0, 520, 4, 0)]
        return [outcome.ttft_s or 0.0 for outcome in run(trace(rows), shape, "round-robin").outcomes]

    free, paid = first_tokens(0.0), first_tokens(0.01)
    first, _, again = (b - a for a, b in zip(free, paid, strict=True))
    assert first > 0.03, "the pages of the last chunk, at least"
    assert again == pytest.approx(0.0, abs=1e-9)


def test_a_simulated_converter_converts_one_page_after_the_other_and_anew_after_an_eviction() -> None:
    converter, (one, two) = Converter(0.1), (BlockHash(bytes([number]) * 16) for number in range(2))
    assert converter.convert([one, two], 1.0) == pytest.approx(1.2)
    assert converter.convert([one], 1.15) == pytest.approx(1.15), "it was ready at 1.1"
    assert converter.convert([two], 1.15) == pytest.approx(1.2), "it is under way"
    converter.forget(one)
    assert converter.convert([one], 2.0) == pytest.approx(2.1)
