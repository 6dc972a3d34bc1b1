"""Answers of requests that allow some tokens alone: with grammars, drafts and masks, and after a resume."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from decode_worker.grammars import allows_none
from tests.unit.grammar.grammars import regex
from tests.unit.scheduler.bench import BLOCK, Bench, tokens
from tests.unit.scheduler.features import grammar_of, match
from tests.unit.scheduler.symbolic import EOS
from tests.unit.scheduler.test_scheduler_grammars import COMPILER, FORCING, OPEN, grammatical
from twostroke.base.token_mask import mask_of, narrowed, permitted
from twostroke.request import FinishReason, SamplingParams, highest_token, token_bits
from twostroke.scheduler.sequence import Sequence
from twostroke.speculation.drafters import ForcedTokens
from twostroke.speculation.prompt_lookup import PromptLookup
from twostroke.speculation.speculation import Acceptance, Speculation

PROMPT = [2, 5, 1, 1, 6, 3, 2]
SOME = SamplingParams(seed=3, max_tokens=40, allowed_tokens=token_bits([2, 4, 6]))


@pytest.mark.parametrize("ids", [[0], [31, 32], [299, 7, 7], list(range(100))])
def test_a_set_of_tokens_has_a_bit_for_each(ids: list[int]) -> None:
    bits = token_bits(ids)
    mask = mask_of(bits)
    assert mask is not None
    assert permitted(mask, 4096).tolist() == sorted(set(ids))
    assert (highest_token(bits), len(bits) % 4) == (max(ids), 0)


def test_no_other_token_is_drawn() -> None:
    bench = Bench()
    answer, finish = bench.finish(bench.answer(PROMPT, SOME))
    assert (set(answer), len(answer), finish) == ({2, 4, 6}, 40, FinishReason.LENGTH)


def test_drafts_propose_and_change_nothing() -> None:
    alone, drafted = Bench(), Bench()
    sequence = drafted.answer(PROMPT, SOME)
    sequence.proposer = Speculation([PromptLookup()], Acceptance())
    assert drafted.finish(sequence) == alone.finish(alone.answer(PROMPT, SOME))


def resumed(bench: Bench, emitted: list[int]) -> Sequence:
    sequence = bench.sequence([*PROMPT, *emitted], SOME)
    sequence.prompt_tokens = len(PROMPT)
    match(sequence, COMPILER.state(OPEN, emitted), BLOCK)
    bench.scheduler.enqueue(sequence)
    return sequence


def test_an_answer_goes_on_elsewhere_with_the_same_tokens_and_a_grammar() -> None:
    bench = Bench()
    whole, finish = bench.finish(grammatical(bench, PROMPT, OPEN, SOME))
    assert (set(whole), finish) == ({2, 4, 6}, FinishReason.LENGTH)
    for cut in (1, 7, 39):
        other = Bench()
        assert other.finish(resumed(other, whole[:cut])) == (whole, finish)


def test_forced_tokens_are_drawn_so_that_none_is_known_that_is_not_allowed() -> None:
    """The grammar forces 3, 4 and 5 after its first two tokens; 5 is not among those that are allowed."""
    bench = Bench()
    sequence = grammatical(bench, tokens(4), FORCING, replace(SOME, allowed_tokens=token_bits([1, 2, 3, 4])))
    state = grammar_of(sequence)
    assert state is not None
    sequence.proposer = Speculation([ForcedTokens(state.forced_run)], Acceptance())
    _, finish = bench.finish(sequence)
    assert finish is FinishReason.ERROR
    assert sequence.known[-2:] == [3, 4]
    assert allows_none(state, replace(SOME, allowed_tokens=token_bits([1, 2, 3, 4])))
    assert bench.is_clean()


def test_a_grammar_that_is_complete_ends_an_answer_that_does_not_allow_the_end() -> None:
    bench = Bench()
    sequence = grammatical(bench, tokens(4), regex(r"[\x01-\x06]{3}"), SOME)
    answer, finish = bench.finish(sequence)
    assert (len(answer), answer[-1], finish) == (4, EOS, FinishReason.STOP)
    assert set(answer[:3]) <= {2, 4, 6}


def test_end_tokens_are_left_only_where_nothing_else_is_allowed() -> None:
    mask = mask_of(token_bits([1, 2, 9]))
    assert mask is not None
    assert permitted(narrowed(mask, mask_of(token_bits([2])), [9]), 32).tolist() == [2]
    assert permitted(narrowed(mask, mask_of(token_bits([3])), [9]), 32).tolist() == [9]
    assert permitted(narrowed(mask, mask_of(token_bits([3, 70])), [8]), 32).tolist() == []
    assert narrowed(mask, None, [9]) is mask


def test_choices_that_are_many_are_checked_at_once_whichever_token_is_allowed() -> None:
    """They are made where all requests wait: a thousand choices, each with a bit for every token of the vocabulary."""
    allowed, began_s = token_bits([(1 << 22) - 1]), time.process_time()
    for choice in range(1000):
        SamplingParams(seed=0, max_tokens=1, choice=choice, allowed_tokens=allowed)
    assert time.process_time() - began_s < 1
