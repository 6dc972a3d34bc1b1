"""What the steps so far say of the cost of a token and of a step."""

from __future__ import annotations

from random import Random

import pytest

from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.worker.measured.rates import Rates

STEP_S, STREAM_S, CONTEXT_S, TOKEN_S = 0.02, 0.0005, 1e-6, 0.001
LINEAR = StepCost(step_s=STEP_S, stream_s=STREAM_S, context_token_s=CONTEXT_S, prompt_token_s=TOKEN_S)
REAL = StepCost(STEP_S, STREAM_S, CONTEXT_S, prompt_step_s=0.005, prompt_token_s=TOKEN_S, prompt_pair_s=6e-7)


def batch(prompt_tokens: int, streams: int, context: int = 0) -> StepTerms:
    """`streams` that attend to `context` tokens each, beside tokens of prompts."""
    return StepTerms(streams, streams * context, prompt_tokens, 0.0)


def chunk(tokens: int, context: int, streams: int = 0) -> StepTerms:
    """Returns a step with a chunk of one prompt, of which `context` tokens are computed, and streams of 500 tokens
    each."""
    return StepTerms(streams, streams * 500, tokens, tokens * (context + tokens / 2))


def seconds(step: StepTerms) -> float:
    return LINEAR.of(step)


def observed(*steps: StepTerms) -> Rates:
    rates = Rates()
    for step in steps:
        rates.observe(step, seconds(step))
    return rates


def learned(steps: list[StepTerms], cost: StepCost = REAL, noise: float = 0.0, seed: int = 1) -> Rates:
    random, rates = Random(seed), Rates()
    for step in steps:
        rates.observe(step, cost.of(step) * random.uniform(1 - noise, 1 + noise))
    return rates


def worst_error(rates: Rates, steps: list[StepTerms], cost: StepCost = REAL) -> float:
    return max(abs(rates.cost.of(step) / cost.of(step) - 1) for step in steps)


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
    alone = [batch(512, 0), batch(0, 1, 100), batch(0, 8, 1000)]
    rates = observed(*alone, *[batch(32, streams, 1000) for streams in (16, 12, 16, 8)] * 10)
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
    emitted = lengths[20:]
    assert sum(emitted) / len(emitted) == about(0.06, 0.05)
    assert max(emitted) < 0.06 * 1.25


def test_a_budget_goes_not_far_beyond_the_longest_chunk_that_was_seen() -> None:
    rates = observed(batch(0, 1), batch(20, 1))
    assert rates.budget(1e6).prompt_tokens(1, 0) == 40


# Three coefficients for prompts, three for streams

SWEEP = [chunk(16, 0), chunk(64, 0), chunk(64, 2048), chunk(128, 0), chunk(16, 2048), chunk(128, 2048)]
PROBES = [chunk(tokens, context) for tokens in (16, 50, 128) for context in (0, 700, 2000)]


def mixed_steps(count: int, seed: int = 2) -> list[StepTerms]:
    random = Random(seed)
    return [chunk(random.choice((0, 16, 64, 128)), random.randrange(4000), random.randrange(16)) for _ in range(count)]


def test_a_short_sweep_tells_what_prompts_of_other_lengths_and_contexts_cost() -> None:
    assert worst_error(learned(SWEEP), PROBES) < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_noise_averages_out_over_steps_that_streams_and_prompts_share(seed: int) -> None:
    steps = [step for step in [batch(0, 4, 500), *SWEEP, *mixed_steps(300, seed)] if step != StepTerms()]
    rates = learned(steps, noise=0.15, seed=seed)
    assert worst_error(rates, PROBES) < 0.15
    assert worst_error(rates, [batch(0, streams, 500) for streams in (1, 8, 15)]) < 0.15


@pytest.mark.parametrize("context", [0, 1000])
def test_chunks_that_are_all_alike_are_predicted_right_however_their_cost_is_split(context: int) -> None:
    same = chunk(128, context)
    rates = learned([same] * 2000, noise=0.1)
    assert worst_error(rates, [same]) < 0.06
    assert rates.seconds_per_token == about(REAL.of(same) / 128, 0.06)


def test_after_many_equal_chunks_others_are_learned_and_the_equal_ones_stay_known() -> None:
    rates = learned([chunk(128, 0)] * 2000)
    others = [chunk(128, 2000), chunk(16, 0), chunk(64, 1000)] * 5
    for step in others:
        rates.observe(step, REAL.of(step))
    assert worst_error(rates, [*others, chunk(128, 0)]) < 0.05


def test_steps_that_met_something_else_on_the_machine_hardly_count() -> None:
    random = Random(4)
    rates = learned([*SWEEP, *SWEEP])
    for step in [chunk(random.choice((16, 64, 128)), random.randrange(3000)) for _ in range(200)]:
        rates.observe(step, REAL.of(step) * (30 if random.random() < 0.02 else 1))
    for step in [chunk(128, context) for context in range(0, 3000, 100)]:
        rates.observe(step, REAL.of(step))
    assert worst_error(rates, PROBES) < 0.05


def test_a_machine_that_becomes_slower_makes_what_is_not_run_meanwhile_dearer_too() -> None:
    slow = StepCost(0.04, 0.001, 2e-6, prompt_step_s=0.01, prompt_token_s=0.002, prompt_pair_s=1.2e-6)
    rates = learned(SWEEP * 10)
    for _ in range(40):
        rates.observe(chunk(64, 500), slow.of(chunk(64, 500)))
    assert worst_error(rates, [chunk(64, 500)], slow) < 0.02
    assert worst_error(rates, [chunk(128, 0), chunk(16, 2000), chunk(128, 2000)], slow) < 0.2


@pytest.mark.parametrize("seed", range(10))
def test_no_cost_is_ever_negative_whatever_is_seen(seed: int) -> None:
    random, rates = Random(seed), Rates()
    for step in mixed_steps(200, seed):
        if step != StepTerms():
            rates.observe(step, random.expovariate(20))
        cost = rates.cost
        terms = (cost.step_s, cost.stream_s, cost.context_token_s)
        assert min(*terms, cost.prompt_step_s, cost.prompt_token_s, cost.prompt_pair_s) >= 0


def test_costs_of_which_one_would_be_negative_predict_what_was_seen_all_the_same() -> None:
    """A base of less than nothing: short chunks are cheaper than their share of long ones."""
    steps = [chunk(16, 0), chunk(64, 0), chunk(128, 0)]
    rates = Rates()
    for step in steps * 20:
        rates.observe(step, 0.001 * step.prompt_tokens * (1.1 if step.prompt_tokens > 16 else 0.9))
    assert rates.cost.prompt_step_s == 0.0
    assert all(rates.cost.of(step) == about(0.0011 * step.prompt_tokens, 0.25) for step in steps)


def test_the_prompt_fraction_of_a_step_is_what_it_would_have_taken_alone() -> None:
    assert REAL.prompt_fraction(batch(0, 4)) == 0.0
    assert REAL.prompt_fraction(chunk(64, 0)) == 1.0
    shared = chunk(64, 100, streams=4)
    assert REAL.prompt_fraction(shared) * REAL.of(shared) == about(REAL.of(chunk(64, 100)), 1e-9)
