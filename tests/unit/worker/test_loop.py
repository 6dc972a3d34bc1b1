"""What the steps so far say of the cost of a token and of a step."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.request import SamplingParams
from twostroke.schedule.batch import Batch, SampleRow
from twostroke.worker.loop import Rates

STEP_S, TOKEN_S = 0.02, 0.001
PARAMS = SamplingParams(seed=1, max_tokens=10)


def batch(tokens: int, samples: int, sequences: int | None = None) -> Batch:
    rows = samples if sequences is None else sequences
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=np.zeros(tokens, np.int32),
        positions=none,
        query_starts=none,
        context_lens=np.zeros(rows, np.int32),
        block_tables=none,
        write_slots=np.zeros(0, np.int64),
        samples=tuple(SampleRow(row, PARAMS, 0) for row in range(samples)),
    )


def seconds(step: Batch) -> float:
    return STEP_S * bool(step.samples) + TOKEN_S * (len(step.tokens) - len(step.samples))


def observed(*steps: Batch) -> Rates:
    rates = Rates()
    for step in steps:
        rates.observe(step, seconds(step))
    return rates


def test_rates_are_unknown_before_the_first_step() -> None:
    rates = Rates()
    assert (rates.seconds_per_step, rates.seconds_per_token) == (0.0, 0.0)


def test_steps_that_only_sample_tell_the_cost_of_a_step_and_nothing_of_prefill() -> None:
    rates = observed(*[batch(4, 4)] * 5)
    assert rates.seconds_per_step == pytest.approx(STEP_S)
    assert rates.seconds_per_token == 0.0


def test_chunks_tell_the_cost_of_prefill_and_nothing_of_a_step() -> None:
    rates = observed(batch(256, 0, 1), batch(512, 0, 2))
    assert rates.seconds_per_token == pytest.approx(TOKEN_S)
    assert rates.seconds_per_step == 0.0


def test_short_tails_cost_what_they_add_to_a_step() -> None:
    rates = observed(batch(3, 3), *[batch(3 + tail, 3) for tail in (1, 7, 15)] * 5)
    assert rates.seconds_per_token == pytest.approx(TOKEN_S)
    assert rates.seconds_per_step == pytest.approx(STEP_S)


def test_a_tail_says_nothing_while_the_cost_of_a_step_is_unknown() -> None:
    assert observed(batch(9, 1)).seconds_per_token == 0.0


def test_a_noisy_tail_hardly_changes_what_a_long_chunk_said() -> None:
    rates = observed(batch(1, 1), batch(512, 0, 1))
    rates.observe(batch(4, 1), 2 * STEP_S)
    assert rates.seconds_per_token == pytest.approx(TOKEN_S, rel=0.06)


def test_a_tail_that_was_faster_than_a_step_never_makes_prefill_cost_less_than_nothing() -> None:
    rates = observed(batch(1, 1))
    rates.observe(batch(5, 1), STEP_S / 2)
    assert rates.seconds_per_token == 0.0


def test_newer_steps_count_more() -> None:
    rates = observed(*[batch(512, 0, 1)] * 20)
    for _ in range(20):
        rates.observe(batch(512, 0, 1), 3 * 512 * TOKEN_S)
    assert rates.seconds_per_token == pytest.approx(3 * TOKEN_S, rel=0.05)
