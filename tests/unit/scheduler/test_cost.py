"""How many prompt tokens fit into a step beside running streams."""

from __future__ import annotations

import pytest

from tests.unit.engine.batches import Stream, step
from twostroke.scheduler.cost import MIN_PROMPT_TOKENS, Budget, Queued, StepCost, StepTerms

COST = StepCost(step_s=0.008, stream_s=0.0005, context_token_s=1e-6, prompt_token_s=0.0005)


def test_what_streams_leave_of_the_target_goes_to_prompts() -> None:
    budget = Budget(0.04, COST, 10_000)
    assert budget.prompt_tokens(4, 4000) == int((0.04 - 0.008 - 0.002 - 0.004) / 0.0005)
    assert budget.prompt_tokens(16, 4000) < budget.prompt_tokens(4, 4000)
    assert budget.prompt_tokens(4, 8000) < budget.prompt_tokens(4, 4000)


def test_prompts_never_starve_however_long_the_streams_take() -> None:
    assert Budget(0.001, COST, 10_000).prompt_tokens(64, 100_000) == MIN_PROMPT_TOKENS


def test_predictions_are_trusted_only_so_far() -> None:
    assert Budget(10.0, COST, 100).prompt_tokens(1, 10) == 100
    assert Budget(0.04, StepCost(step_s=0.01), 32).prompt_tokens(1, 10) == 32, "the cost of prompt tokens is unknown"


def test_a_prompt_beside_streams_waits_for_their_share_of_each_step_too() -> None:
    budget = Budget(0.04, COST, 10_000)
    chunk = budget.prompt_tokens(4, 4000)
    beside = Queued(10 * chunk, 0.0, streams=4, context_tokens=4000)
    assert budget.drain_s(beside, 512) == pytest.approx(10 * 0.04, rel=0.02)
    assert budget.drain_s(Queued(1000, 0.0), 512) == COST.of_prompts(2, 1000, 0.0)


def test_a_prompt_that_attends_to_much_gets_fewer_tokens_of_the_same_time() -> None:
    cost = StepCost(step_s=0.008, prompt_step_s=0.002, prompt_token_s=0.0005, prompt_pair_s=1e-7)
    budget = Budget(0.06, cost, 10_000)
    for context in (0, 1000, 10_000):
        chunk = budget.prompt_tokens(1, 0, context)
        assert 0.0585 < cost.of_streams(1, 0) + cost.of_prompt(chunk, context, 0) <= 0.06
    assert budget.prompt_tokens(1, 0, 10_000) < budget.prompt_tokens(1, 0, 0) / 2


def test_the_terms_of_a_step_are_what_its_rows_run_and_attend_to() -> None:
    """A row that samples runs one token for that; the others of it are a prompt's."""
    chunk = Stream([1] * 100, list(range(7)), computed=20)
    end_of_prompt = Stream([2] * 40, [7, 8, 9], computed=30)
    stream = Stream([3] * 50, [10, 11, 12, 13], computed=49)
    assert StepTerms.of(step([(stream, 1)])) == StepTerms(1, 50)
    assert StepTerms.of(step([(chunk, 30)])) == StepTerms(0, 0, 30, 30 * (20 + 15))
    terms = StepTerms.of(step([(chunk, 30), (end_of_prompt, 10), (stream, 1)]))
    assert terms == StepTerms(2, 40 + 50, 30 + 9, 30 * (20 + 15) + 9 * (30 + 4.5))
    cost = StepCost(1, 2, 3, prompt_step_s=4, prompt_token_s=5, prompt_pair_s=6)
    assert cost.of(terms) == 1 + 2 * 2 + 3 * 90 + 4 + 5 * 39 + 6 * terms.prompt_pairs
    assert cost.of_prompt(30, 20, 10) == 3 * 4 + 5 * 30 + 6 * 30 * 35


def test_a_step_is_the_longer_the_longer_prompts_wait_and_the_fewer_streams_it_harms() -> None:
    def step_s(streams: int, waiting_s: float | None = 0.0) -> float:
        return Budget(0.08, COST, 10_000, waiting_s).step_s(streams, 0)

    assert step_s(16) == pytest.approx((0.008 + 16 * 0.0005) * 1.5)
    assert step_s(4) == pytest.approx((0.008 + 4 * 0.0005) * 3)
    assert step_s(16, 2.0) == step_s(16, 0.1) < step_s(16, 4.0) < step_s(16, 8.0)
    assert step_s(16, 4.0) == pytest.approx(2 * 0.016)
    assert step_s(0) == step_s(16, None) == step_s(16, 1e6) == 0.08, "the target, where nothing speaks against it"


def test_prompts_get_small_chunks_beside_many_streams() -> None:
    few, many = (Budget(0.08, COST, 10_000, waiting_s=0.0).prompt_tokens(streams, 0) for streams in (16, 4))
    assert few == int((0.016 * 0.5) / 0.0005) or few == MIN_PROMPT_TOKENS
    assert many == pytest.approx(2 * 0.010 / 0.0005, abs=1)
