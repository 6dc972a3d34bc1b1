"""What the steps so far say of the cost of a token and of a step."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from twostroke.request import SamplingParams
from twostroke.schedule.batch import Batch, SampleRow
from twostroke.worker.rates import Rates

STEP_S, STREAM_S, CONTEXT_S, TOKEN_S = 0.02, 0.0005, 1e-6, 0.001
PARAMS = SamplingParams(seed=1, max_tokens=10)


def batch(prompt_tokens: int, streams: int, context: int = 0) -> Batch:
    """`streams` that attend to `context` tokens each, beside tokens of prompts."""
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=np.zeros(prompt_tokens + streams, np.int32),
        positions=none,
        query_starts=none,
        context_lens=np.full(streams, context, np.int32),
        block_tables=none,
        write_slots=np.zeros(0, np.int64),
        samples=tuple(SampleRow(row, PARAMS, 0) for row in range(streams)),
    )


def seconds(step: Batch) -> float:
    streams = len(step.samples)
    of_streams_s = STEP_S * bool(streams) + streams * STREAM_S + CONTEXT_S * float(step.context_lens.sum())
    return of_streams_s + TOKEN_S * (len(step.tokens) - streams)


def observed(*steps: Batch) -> Rates:
    rates = Rates()
    for step in steps:
        rates.observe(step, seconds(step))
    return rates


def about(expected: float, rel: float = 0.03) -> object:
    return pytest.approx(expected, rel=rel)


def test_rates_are_unknown_before_the_first_step() -> None:
    rates = Rates()
    assert (rates.seconds_per_step, rates.seconds_per_token) == (0.0, 0.0)


def test_steps_that_only_sample_tell_the_cost_of_a_step_and_nothing_of_prefill() -> None:
    rates = observed(*[batch(0, 4)] * 5)
    assert rates.seconds_per_step == about(STEP_S + 4 * STREAM_S)
    assert rates.seconds_per_token == 0.0


def test_chunks_tell_the_cost_of_prefill_and_nothing_of_a_step() -> None:
    rates = observed(batch(256, 0), batch(512, 0))
    assert rates.seconds_per_token == about(TOKEN_S)
    assert rates.seconds_per_step == 0.0


def test_short_tails_cost_what_they_add_to_a_step() -> None:
    rates = observed(batch(0, 3), *[batch(tail, 3) for tail in (1, 7, 15)] * 5)
    assert rates.seconds_per_token == about(TOKEN_S, 0.1)
    assert rates.seconds_per_step == about(STEP_S + 3 * STREAM_S)


def test_a_tail_says_nothing_while_neither_cost_is_known() -> None:
    rates = observed(batch(8, 1))
    assert (rates.seconds_per_token, rates.seconds_per_step) == (0.0, 0.0)


def test_a_noisy_tail_hardly_changes_what_a_long_chunk_said() -> None:
    rates = observed(batch(0, 1), batch(512, 0))
    rates.observe(batch(3, 1), 2 * STEP_S)
    assert rates.seconds_per_token == about(TOKEN_S, 0.06)


def test_a_tail_that_was_faster_than_a_step_never_makes_prefill_cost_less_than_nothing() -> None:
    rates = observed(batch(0, 1))
    rates.observe(batch(4, 1), STEP_S / 2)
    assert rates.seconds_per_token >= 0.0


def test_newer_steps_count_more() -> None:
    rates = observed(*[batch(512, 0)] * 20)
    for _ in range(30):
        rates.observe(batch(512, 0), 2.5 * 512 * TOKEN_S)
    assert rates.seconds_per_token == about(2.5 * TOKEN_S, 0.05)


def test_costs_are_told_apart_where_streams_and_prompts_share_every_step() -> None:
    random = Random(3)
    steps = [batch(random.randrange(16, 80), random.randrange(1, 16), random.randrange(1000)) for _ in range(200)]
    rates = observed(batch(512, 0), *steps)
    assert rates.seconds_per_token == about(TOKEN_S, 0.1)
    for streams, context in ((1, 100), (4, 900), (16, 1000)):
        real_s = seconds(batch(0, streams, context))
        assert rates.cost.of_streams(streams, streams * context) == about(real_s, 0.1)


def test_streams_that_end_while_prompts_run_make_the_predicted_step_shorter() -> None:
    rates = observed(batch(512, 0), *[batch(32, streams, 1000) for streams in (16, 12, 16, 8)] * 10)
    for _ in range(10):
        rates.observe(batch(32, 2, 1000), seconds(batch(32, 2, 1000)))
    assert rates.seconds_per_step == about(seconds(batch(0, 2, 1000)), 0.15)


def test_one_step_that_took_far_too_long_is_not_believed() -> None:
    rates = observed(*[batch(0, 4)] * 20)
    before_s = rates.seconds_per_step
    rates.observe(batch(0, 4), 100 * before_s)
    assert rates.seconds_per_step < 3 * before_s


def test_after_a_long_time_without_prompts_a_noisy_tail_still_says_little() -> None:
    rates = observed(batch(0, 4), *[batch(512, 0)] * 5, *[batch(0, 4)] * 5000)
    for tail in (3, 5, 1):
        rates.observe(batch(tail, 4), 1.3 * seconds(batch(tail, 4)))
    assert rates.seconds_per_token == about(TOKEN_S, 0.5)


def test_a_cost_that_changed_while_nobody_paid_it_is_learned_anew() -> None:
    rates = observed(batch(0, 4), *[batch(512, 0)] * 5, *[batch(0, 4)] * 500)
    for _ in range(30):
        rates.observe(batch(512, 0), 4 * 512 * TOKEN_S)
    assert rates.seconds_per_token == about(4 * TOKEN_S, 0.05)


def test_the_prompt_tokens_of_a_budget_make_steps_of_the_target_length() -> None:
    random = Random(5)
    rates = observed(batch(0, 4, 500))
    lengths: list[float] = []
    for step in range(200):
        streams = 2 + step // 40
        chunk = rates.budget(0.06).prompt_tokens(streams, streams * 500)
        lengths.append(seconds(batch(chunk, streams, 500)) * random.uniform(0.95, 1.05))
        rates.observe(batch(chunk, streams, 500), lengths[-1])
    settled = lengths[20:]
    assert sum(settled) / len(settled) == about(0.06, 0.05)
    assert max(settled) < 0.06 * 1.25


def test_a_budget_goes_not_far_beyond_the_longest_chunk_that_was_seen() -> None:
    rates = observed(batch(0, 1), batch(20, 1))
    assert rates.budget(1e6).prompt_tokens(1, 0) == 40
