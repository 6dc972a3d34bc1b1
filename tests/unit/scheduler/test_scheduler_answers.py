"""How answers end, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.scheduler.bench import BLOCK, FOREVER, Bench, tokens
from tests.unit.scheduler.symbolic import (
    EOS,
    VOCABULARY,
    answer_alone,
    limits,
)
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.request import FinishReason, SamplingParams


def stop_after(count: int, seed: int, accept: Callable[[list[int]], bool]) -> list[int]:
    """A prompt whose first `count` tokens of answer satisfy `accept`."""
    params = SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)
    prompts = ([a, b, c] for a in range(VOCABULARY) for b in range(VOCABULARY) for c in range(VOCABULARY))
    return next(prompt for prompt in prompts if accept(answer_alone(prompt, params, 4096)[0]))


def test_an_answer_ends_at_the_end_of_sequence_token() -> None:
    prompt = stop_after(5, 0, lambda answer: answer.index(EOS) == 4 if EOS in answer else False)
    bench = Bench()
    answer, finish = bench.finish(bench.answer(prompt, SamplingParams(seed=0, max_tokens=9)))
    assert (len(answer), answer[-1], finish) == (5, EOS, FinishReason.STOP)
    assert bench.is_clean()


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    prompt = stop_after(3, 0, lambda answer: EOS in answer)
    bench = Bench()
    answer, finish = bench.finish(bench.answer(prompt, SamplingParams(seed=0, max_tokens=6, ignore_eos=True)))
    assert (len(answer), finish) == (6, FinishReason.LENGTH)
    assert EOS in answer


def test_an_answer_ends_at_a_stop_token_even_where_eos_is_ignored() -> None:
    prompt = stop_after(3, 0, lambda answer: answer.count(5) == 1 and answer[2] == 5)
    bench = Bench()
    params = SamplingParams(seed=0, max_tokens=9, stop_token_ids=(5,), ignore_eos=True)
    answer, finish = bench.finish(bench.answer(prompt, params))
    assert (len(answer), finish) == (3, FinishReason.STOP)


def test_a_stop_token_that_is_also_the_last_one_allowed_is_a_stop() -> None:
    prompt = stop_after(2, 0, lambda answer: answer[0] != EOS and answer[1] == EOS)
    bench = Bench()
    assert bench.finish(bench.answer(prompt, SamplingParams(seed=0, max_tokens=2)))[1] is FinishReason.STOP


def test_before_min_tokens_neither_eos_nor_stop_tokens_can_be_drawn() -> None:
    bench = Bench()
    params = SamplingParams(seed=0, max_tokens=9, min_tokens=2, stop_token_ids=(5,))
    sequence = bench.answer([1, 2], params)
    bench.admit()
    banned = []
    for _ in range(3):
        step = bench.scheduler.plan()
        assert step is not None
        banned.append(step.batch.samples[0].banned)
        bench.scheduler.update(step, bench.runner.run(step))
        if sequence.ended:
            break
    assert banned[:2] == [(EOS, 5), (EOS, 5)]
    assert banned[2:] in ([], [()])
    assert len(sequence.known) > 4


def test_an_answer_ends_at_the_models_length() -> None:
    bench = Bench(of=limits(BLOCK, max_model_len=10))
    answer, finish = bench.finish(bench.answer(tokens(7), FOREVER))
    assert (len(answer), finish) == (3, FinishReason.LENGTH)


def test_penalties_are_told_prompt_and_answer_apart() -> None:
    bench = Bench()
    bench.answer([1, 2], SamplingParams(seed=0, max_tokens=9, presence_penalty=1.0, ignore_eos=True))
    bench.admit()
    (first,) = bench.step()
    step = bench.scheduler.plan()
    assert step is not None
    (row,) = step.batch.samples
    assert (row.prompt, row.output, row.position) == ((1, 2), (first.token.token,), 3)


def test_a_finished_answers_blocks_stay_for_the_next_turn() -> None:
    bench = Bench()
    sequence = bench.answer(tokens(6), SamplingParams(seed=0, max_tokens=11, ignore_eos=True))
    bench.finish(sequence)
    bench.answer([*sequence.known, 2, 2])
    (admission,) = bench.admit()
    assert admission.sequence.hit_blocks == 4  # 17 tokens are known, the last one's KV was never computed
    assert bench.pool.count(PageState.ARRIVING) == 0
