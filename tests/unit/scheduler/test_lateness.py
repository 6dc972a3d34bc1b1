"""A prompt is late if those before it and itself take longer than is left of the time that was promised."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.bench import Bench, tokens
from twostroke.base.ids import SessionId
from twostroke.scheduler.cost import Budget, Queued, StepCost
from twostroke.scheduler.lateness import MARGIN, DuePrompt, has_late, waiting_s

STEP_TOKENS = 100
TOKEN_S = 0.001
ALONE = Budget(0.04, StepCost(step_s=0.01, prompt_token_s=TOKEN_S), most_prompt_tokens=STEP_TOKENS)
STREAMS = Queued(streams=4, context_tokens=400, stream_tokens=4)


def prompt(count: int, due_s: float | None = None) -> DuePrompt:
    return DuePrompt(count, count**2 / 2, due_s)


def test_a_prompt_is_late_if_its_own_time_is_more_than_what_is_left() -> None:
    needs_s = MARGIN * 1000 * TOKEN_S
    assert not has_late([prompt(1000, 5 + 1.01 * needs_s)], Queued(), ALONE, STEP_TOKENS, 5.0)
    assert has_late([prompt(1000, 5 + 0.99 * needs_s)], Queued(), ALONE, STEP_TOKENS, 5.0)


def test_what_is_computed_before_it_counts_and_what_comes_after_it_does_not() -> None:
    due = prompt(1000, 2 * 1000 * TOKEN_S)
    assert has_late([prompt(1000), due], Queued(), ALONE, STEP_TOKENS, 0.0)
    assert not has_late([due, prompt(1000)], Queued(), ALONE, STEP_TOKENS, 0.0)


def test_streams_beside_it_make_it_late() -> None:
    due = prompt(1000, 1.5 * 1000 * TOKEN_S)
    assert not has_late([due], Queued(), ALONE, STEP_TOKENS, 0.0)
    assert has_late([due], STREAMS, ALONE, STEP_TOKENS, 0.0)


def test_nothing_is_late_where_nothing_was_promised_or_no_cost_is_known() -> None:
    assert not has_late([prompt(10**6)], STREAMS, ALONE, STEP_TOKENS, 0.0)
    assert not has_late([prompt(1000, 0.001)], Queued(), Budget(0.04, StepCost(), 100), STEP_TOKENS, 0.0)


@pytest.mark.parametrize("is_build", [False, True])
def test_a_scheduler_says_what_is_left_of_each_prompt_and_when_it_is_due(is_build: bool) -> None:
    bench = Bench(24, max_num_batched_tokens=8, max_num_seqs=2)
    sequences = [(bench.prefill if is_build else bench.answer)(tokens(24, number)) for number in range(3)]
    for due_s, sequence in enumerate(sequences):
        sequence.due_s = float(due_s)
    bench.admit()
    bench.step()
    assert list(bench.scheduler.load.due_prompts()) == [
        DuePrompt(16, 16 * (8 + 8), 0.0), DuePrompt(24, 24 * 12, 1.0), DuePrompt(24, 24 * 12, 2.0)
    ], "two of three run"  # fmt: skip


def test_a_stream_and_a_prompt_that_is_written_elsewhere_are_none_that_this_worker_computes() -> None:
    bench = Bench()
    stream, pulled = bench.answer(tokens(8)), bench.answer(tokens(8, 2))
    stream.due_s = pulled.due_s = 1.0
    for admission in bench.admit():
        if admission.sequence is pulled:
            for block, _ in admission.missing:
                bench.pool.assign_writer(pulled.pages[block], SessionId(99))
    bench.step()
    assert stream.answer_tokens == 1
    assert list(bench.scheduler.load.due_prompts()) == []


def test_prompts_wait_for_those_before_them_and_for_themselves() -> None:
    cost = StepCost(prompt_step_s=0.01, prompt_token_s=TOKEN_S)
    first_s, second_s = 0.01 + 100 * TOKEN_S, 2 * 0.01 + 150 * TOKEN_S
    assert waiting_s([], cost, STEP_TOKENS) == 0
    assert waiting_s([prompt(100), prompt(150)], cost, STEP_TOKENS) == pytest.approx(first_s + first_s + second_s)


def test_a_promise_counts_however_many_prompts_are_computed_before_it() -> None:
    bench = Bench(400, max_num_seqs=200)
    for number in range(100):
        sequence = bench.prefill([number, *tokens(4)])
        sequence.due_s = 5.0 if number == 99 else None
        bench.admit()
    due = list(bench.scheduler.load.due_prompts())
    assert [prompt.due_s for prompt in due] == [None] * 99 + [5.0]
    assert has_late(due, Queued(), ALONE, STEP_TOKENS, 5.0)
