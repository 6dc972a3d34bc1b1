"""How many tokens a draft model draws for each stream: the most tokens per second that any choice would bring."""

from __future__ import annotations

import itertools
import random

from twostroke.scheduler.constraints.model_drafting import DraftCandidate, model_lengths, pays_catching_up
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.speculation.draft import Draft

MODEL = StepCost(step_s=0.1, stream_s=0.002, prompt_token_s=0.005)
DRAFT = StepCost(step_s=0.02, stream_s=0.0005, prompt_token_s=0.001)
ALONE = StepTerms(streams=1, context_tokens=100)


def tokens_per_s(lengths: tuple[int, ...], candidates: list[DraftCandidate], step: StepTerms) -> float:
    """Tokens per second of a choice of lengths, by hand."""
    tokens, seconds = float(step.streams), MODEL.of(step)
    for each, length in zip(candidates, lengths, strict=True):
        tokens += sum(each.chance**rank for rank in range(1, length + 1))
        seconds += length * MODEL.stream_s
    for rank in range(1, max(lengths) + 1):
        drafting = [each for each, length in zip(candidates, lengths, strict=True) if length >= rank]
        seconds += DRAFT.of_streams(len(drafting), sum(each.known_tokens for each in drafting))
    return tokens / seconds


def test_no_other_choice_for_a_stream_alone_brings_more_tokens_per_second() -> None:
    for chance in (0.05, 0.2, 0.5, 0.7, 0.9, 0.99):
        candidates = [DraftCandidate(chance, 12, 100)]
        chosen = model_lengths(candidates, DRAFT, MODEL, ALONE, 32)
        best = max(tokens_per_s((length,), candidates, ALONE) for length in range(13))
        assert tokens_per_s(chosen.tokens, candidates, ALONE) == best
        assert abs(chosen.tokens_per_s - best) < 1e-9


def test_streams_share_the_steps_of_the_draft_model_and_come_near_to_the_best_choice() -> None:
    draws = random.Random(1)
    for _ in range(50):
        candidates = [DraftCandidate(draws.random(), 5, 100) for _ in range(3)]
        step = StepTerms(streams=3, context_tokens=300)
        chosen = model_lengths(candidates, DRAFT, MODEL, step, 32)
        best = max(tokens_per_s(each, candidates, step) for each in itertools.product(range(6), repeat=3))
        assert tokens_per_s(chosen.tokens, candidates, step) > 0.98 * best


def test_a_draft_model_that_is_mostly_wrong_or_slow_drafts_nothing() -> None:
    assert model_lengths([DraftCandidate(0.1, 8, 100)], DRAFT, MODEL, ALONE, 32).tokens == (0,)
    assert model_lengths([DraftCandidate(0.9, 8, 100)], MODEL, MODEL, ALONE, 32).tokens == (0,)
    assert model_lengths([DraftCandidate(0.9, 8, 100)], StepCost(), MODEL, ALONE, 32).tokens == (0,)
    assert model_lengths([DraftCandidate(0.9, 8, 100)], DRAFT, StepCost(), ALONE, 32).tokens == (0,)


def test_other_drafters_are_kept_to_where_they_expect_more() -> None:
    sure = Draft((1,) * 8, tuple(0.98**rank for rank in range(1, 9)))
    candidates = [DraftCandidate(0.8, 8, 100, sure), DraftCandidate(0.8, 8, 100)]
    lengths = model_lengths(candidates, DRAFT, MODEL, StepTerms(streams=2, context_tokens=200), 32).tokens
    assert lengths[0] == 0
    alone = model_lengths(candidates[1:], DRAFT, MODEL, ALONE, 32).tokens
    assert alone[0] > 0


def test_drafts_are_no_longer_than_asked_for_and_no_more_in_all_than_a_step_runs() -> None:
    candidates = [DraftCandidate(0.99, most, 100) for most in (0, 1, 5)]
    step = StepTerms(streams=3, context_tokens=300)
    lengths = model_lengths(candidates, DRAFT, MODEL, step, 32).tokens
    assert all(length <= each.most for length, each in zip(lengths, candidates, strict=True))
    assert lengths[2] == 5
    assert sum(model_lengths(candidates, DRAFT, MODEL, step, 3).tokens) <= 3


def test_a_prompt_is_caught_up_with_only_where_the_answer_is_long_enough_for_it() -> None:
    stream = DraftCandidate(0.7, 32, 2000)
    assert pays_catching_up(stream, 2000, 200, DRAFT, MODEL, ALONE)
    assert not pays_catching_up(stream, 2000, 5, DRAFT, MODEL, ALONE)
    assert pays_catching_up(stream, 20, 5, DRAFT, MODEL, ALONE)
    assert not pays_catching_up(stream._replace(chance=0.05), 20, 1000, DRAFT, MODEL, ALONE)
