"""Answers that have to match a grammar: forced tokens need no step of their own, and change no token."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.unit.grammar.grammars import byte_compiler, regex
from tests.unit.scheduler.bench import BLOCK, Bench, tokens
from tests.unit.scheduler.features import grammar_of, match
from tests.unit.scheduler.symbolic import EOS, VOCABULARY, limits
from tests.unit.scheduler.windows.test_scheduler_windows import WindowBench
from twostroke.base.ids import PageId
from twostroke.kv_cache.windows.shape import WindowShape
from twostroke.request import FinishReason, Grammar, SamplingParams
from twostroke.scheduler.cost import Budget, StepCost
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import Emission
from twostroke.speculation.drafters import ForcedTokens
from twostroke.speculation.speculation import Acceptance, Speculation

COMPILER = byte_compiler(VOCABULARY, (EOS,))
RUN = [3, 4, 5, 3, 4, 5, 3, 4, 5]
"""What follows the second choice."""
FORCING = regex(r"[\x01-\x06]([\x01-\x03]\x03\x04\x05\x03\x04\x05\x03\x04\x05){4}[\x01\x02]")
ANSWER_TOKENS = 1 + 4 * 10 + 1 + 1
"""Those of FORCING, and the end."""
OPEN = regex(r"[\x00-\x06]*")
PARAMS = SamplingParams(seed=3, max_tokens=100)


def grammatical(
    bench: Bench, prompt: list[int], grammar: Grammar = FORCING, params: SamplingParams = PARAMS
) -> Sequence:
    sequence = bench.sequence(prompt, params)
    match(sequence, COMPILER.state(grammar), BLOCK)
    bench.scheduler.enqueue(sequence)
    return sequence


def one_by_one(params: SamplingParams = PARAMS) -> SamplingParams:
    """The same, but each token gets a step of its own."""
    return replace(params, logprobs=0)


@pytest.mark.parametrize("prompt", [tokens(3), tokens(4), [2, 5, 1, 1, 6, 3, 2]])
def test_forced_tokens_change_no_answer_and_save_steps(prompt: list[int]) -> None:
    fast, slow = Bench(), Bench()
    run, single = grammatical(fast, prompt), grammatical(slow, prompt, params=one_by_one())
    answer, finish = fast.finish(run)
    assert (answer, finish) == slow.finish(single)
    assert (len(answer), answer[-1], finish) == (ANSWER_TOKENS, EOS, FinishReason.STOP)
    assert single.steps == ANSWER_TOKENS
    assert run.steps == 1 + 4 + 1, "one for each token that was a choice"
    state = grammar_of(run)
    assert state is not None
    assert state.forced_tokens == ANSWER_TOKENS - run.steps
    assert fast.is_clean()


@pytest.mark.parametrize("prompt", [tokens(3), tokens(4), [2, 5, 1, 1, 6, 3, 2]])
def test_forced_tokens_whose_logprobs_are_asked_for_are_drafted_and_all_kept(prompt: list[int]) -> None:
    """Whatever the rates of other proposals: each row draws the one token that may come, with its own logprob."""
    drafted, single = Bench(), Bench()
    run, alone = grammatical(drafted, prompt, params=one_by_one()), grammatical(single, prompt, params=one_by_one())
    state = grammar_of(run)
    assert state is not None
    run.proposer = speculation = Speculation([ForcedTokens(state.forced_run)], Acceptance())
    cost = StepCost(step_s=1.0, stream_s=0.1)
    emissions = {}
    for bench, sequence in ((drafted, run), (single, alone)):
        emissions[sequence] = []
        while not sequence.ended:
            bench.admit()
            step = bench.scheduler.plan(Budget(1.0, cost, most_prompt_tokens=8))
            assert step is not None
            emissions[sequence] += bench.scheduler.update(step, bench.runner.run(step))
    assert [(each.token, each.finish) for each in emissions[run]] == [
        (each.token, each.finish) for each in emissions[alone]
    ]
    assert all(each.token.logprob is not None for each in emissions[run])
    assert speculation.outcome.run == speculation.outcome.kept == alone.steps - run.steps
    assert run.steps == 1 + 1 + 4 + 1, "two choices, each forced run with the choice behind it, and the end"
    assert drafted.is_clean()


def test_the_next_step_computes_forced_tokens_in_one_chunk() -> None:
    bench = Bench()
    sequence = grammatical(bench, tokens(6))
    bench.admit()
    assert [len(bench.step()), len(bench.step())] == [1, 1 + len(RUN)]
    assert sequence.known[8:] == RUN
    assert bench.planned() == [(sequence, 7, 8 + len(RUN))]


def test_an_answer_goes_on_after_each_of_its_tokens_as_if_nothing_had_happened() -> None:
    """A worker that takes a stream over knows the tokens that were emitted, in the midst of a forced run too."""
    prompt = [2, 5, 1, 1, 6, 3, 2]
    bench = Bench()
    whole, _ = bench.finish(grammatical(bench, prompt))
    for cut in range(1, len(whole)):
        other = Bench()
        resumed = other.sequence([*prompt, *whole[:cut]], PARAMS)
        resumed.prompt_tokens = len(prompt)
        match(resumed, COMPILER.state(FORCING, whole[:cut]), BLOCK)
        other.scheduler.enqueue(resumed)
        answer, finish = other.finish(resumed)
        assert (answer, finish) == (whole, FinishReason.STOP), f"after {cut} tokens"


def test_a_preempted_answer_goes_on_as_if_nothing_had_happened() -> None:
    prompts = [[1, 2, 3, first] for first in range(4)]
    alone = []
    for prompt in prompts:
        bench = Bench()
        alone.append(bench.finish(grammatical(bench, prompt))[0])
    tight = Bench(pages=20)
    sequences = [grammatical(tight, prompt) for prompt in prompts]
    emissions: list[Emission] = []
    while not all(sequence.ended for sequence in sequences):
        tight.admit()
        emissions += tight.step()
    assert sum(sequence.preemptions for sequence in sequences)
    for sequence, answer in zip(sequences, alone, strict=True):
        assert sequence.known[4:] == answer
        assert [each.token.token for each in emissions if each.sequence is sequence] == answer
    assert tight.is_clean()


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11, 12, ANSWER_TOKENS - 1, ANSWER_TOKENS])
def test_an_answer_ends_at_max_tokens_in_a_forced_run_too(max_tokens: int) -> None:
    params = SamplingParams(seed=3, max_tokens=max_tokens)
    fast, slow = Bench(), Bench()
    answer, finish = fast.finish(grammatical(fast, tokens(5), params=params))
    assert (answer, finish) == slow.finish(grammatical(slow, tokens(5), params=one_by_one(params)))
    assert len(answer) == max_tokens
    assert finish is (FinishReason.STOP if max_tokens == ANSWER_TOKENS else FinishReason.LENGTH)


def test_an_answer_ends_at_a_stop_token_and_at_the_models_length_in_a_forced_run_too() -> None:
    stop = SamplingParams(seed=3, max_tokens=100, stop_token_ids=(4,))
    bench = Bench()
    answer, finish = bench.finish(grammatical(bench, tokens(5), params=stop))
    assert (answer.index(4), finish) == (len(answer) - 1, FinishReason.STOP)
    short = Bench(of=limits(BLOCK, max_model_len=12))
    answer, finish = short.finish(grammatical(short, tokens(5)))
    assert (len(answer), finish) == (7, FinishReason.LENGTH)


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 90}])
def test_a_finished_grammar_ends_an_answer_whatever_else_was_asked_for(more: dict[str, int]) -> None:
    bench = Bench()
    sequence = grammatical(bench, tokens(5), params=replace(PARAMS, **more))  # type: ignore[arg-type]  # of the test's own keys
    answer, finish = bench.finish(sequence)
    assert (len(answer), answer[-1], finish) == (ANSWER_TOKENS, EOS, FinishReason.STOP)


def test_a_grammar_that_may_end_goes_on_to_min_tokens() -> None:
    bench = Bench()
    params = SamplingParams(seed=1, max_tokens=60, min_tokens=50)
    answer, _ = bench.finish(grammatical(bench, tokens(5), OPEN, params))
    assert len(answer) >= 50
    assert EOS not in answer[:49]


def test_forced_tokens_run_beside_streams_whose_budget_is_spent() -> None:
    """A long prompt waits for its share of each step; what a grammar has forced does not wait with it."""
    bench = Bench()
    running = [grammatical(bench, [1, 2, first]) for first in range(3)]
    bench.admit()
    bench.step()
    bench.step()
    bench.prefill(tokens(64))
    bench.admit()
    budget = Budget(0.0, StepCost(), most_prompt_tokens=0)
    chunks = {sequence: end for sequence, _, end in bench.planned(budget)}
    assert [chunks[sequence] for sequence in running] == [3 + 1 + 1 + len(RUN)] * 3


def test_a_token_outside_the_grammar_fails_its_answer_alone() -> None:
    bench = Bench()
    broken, sound = grammatical(bench, [1, 2, 3]), grammatical(bench, [4, 5, 6])
    bench.admit()
    bench.step()
    state = grammar_of(broken)
    assert state is not None
    state.consume(EOS)
    emissions = list(itertools.chain(bench.step(), bench.step()))
    failed = [each for each in emissions if each.sequence is broken]
    assert failed[-1].finish is FinishReason.ERROR
    assert broken.ended
    assert len(bench.finish(sound)[0]) == ANSWER_TOKENS
    assert bench.is_clean()


@pytest.mark.parametrize("has_exact_blocks", [False, True])
@pytest.mark.parametrize("window", [None, 4, 6, 30])
def test_forced_tokens_change_no_answer_whatever_pages_hold(has_exact_blocks: bool, window: int | None) -> None:
    """Blocks that are seen exact while they are unfinished, and window parts with hardly more slots than are needed."""
    prompts = [[1, 2, 3, 5, 2, first] for first in range(3)]

    def fresh() -> Bench:
        if window is None:
            return Bench(has_exact_blocks=has_exact_blocks)
        slots = WindowShape(PageId(0), 0, window, BLOCK, has_exact_blocks).least_slots + 6
        return WindowBench(slots=slots, window=window, has_exact_blocks=has_exact_blocks)

    alone = []
    for prompt in prompts:
        bench = fresh()
        alone.append(bench.finish(grammatical(bench, prompt, params=one_by_one()))[0])
    together = fresh()
    sequences = [grammatical(together, prompt) for prompt in prompts]
    while not all(sequence.ended for sequence in sequences):
        together.admit()
        together.step()
    assert [sequence.known[6:] for sequence in sequences] == alone
