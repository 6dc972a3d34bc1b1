"""Tests of who is admitted, and of which tokens run next."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.scheduler.bench import BLOCK, Bench, tokens
from tests.unit.scheduler.symbolic import (
    answer_alone,
    answering,
    limits,
)
from twostroke.base.errors import Overloaded
from twostroke.base.ids import SessionId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.request import FinishReason, SamplingParams
from twostroke.scheduler.cost import MIN_PROMPT_TOKENS, Budget, StepCost

# Admission


def test_sequences_are_admitted_in_the_order_of_their_arrival() -> None:
    bench = Bench(max_num_seqs=2)
    first, second, third = (bench.answer(tokens(3)) for _ in range(3))
    assert bench.admitted() == [first, second]
    assert bench.admitted() == []
    bench.scheduler.end(first)
    assert bench.admitted() == [third]


def test_who_has_answered_elsewhere_waits_before_all_who_have_not() -> None:
    bench = Bench(max_num_seqs=1)
    holder = bench.answer(tokens(3))
    assert bench.admitted() == [holder]
    fresh = [bench.answer(tokens(3)) for _ in range(2)]
    moved = [bench.sequence(tokens(5)) for _ in range(2)]
    for sequence in moved:
        sequence.prompt_tokens = 3
        bench.scheduler.enqueue(sequence)
    for leaves, comes in pairwise([holder, *moved, *fresh]):
        bench.scheduler.end(leaves)
        assert bench.admitted() == [comes]


def test_admission_claims_pages_for_the_prompt_plus_one() -> None:
    bench = Bench()
    for length, pages in ((1, 1), (3, 1), (4, 2), (5, 2), (8, 3)):
        sequence = bench.answer(tokens(length, token=length))
        bench.admit()
        assert len(sequence.pages) == pages


def test_a_job_that_only_builds_pages_claims_no_room_for_an_answer() -> None:
    bench = Bench()
    job = bench.prefill(tokens(8))
    bench.admit()
    assert len(job.pages) == 2


def test_an_admission_tells_which_blocks_are_missing() -> None:
    bench = Bench()
    bench.finish(bench.answer(tokens(8), SamplingParams(seed=0, max_tokens=1)))
    bench.answer([*tokens(8), 2, 2, 2, 2, 3])
    (admission,) = bench.admit()
    assert admission.missing == [Part(2, GroupKind.FULL)]
    assert (admission.sequence.hit_blocks, admission.sequence.computed) == (2, 8)


def test_a_short_one_may_pass_a_long_one_max_passes_times() -> None:
    bench = Bench(8, max_passes=2)
    holder = bench.answer(tokens(15, token=0))
    bench.admit()
    long = bench.answer(tokens(20, token=1))
    short = [bench.answer([2, number]) for number in range(3)]
    assert bench.admitted() == short[:2]
    assert long.passes == 2
    bench.scheduler.end(short[0])
    assert bench.admitted() == []
    bench.scheduler.end(holder)
    bench.scheduler.end(short[1])
    assert bench.admitted() == [long, short[2]]


def test_nobody_passes_where_max_passes_is_zero() -> None:
    bench = Bench(8, max_passes=0)
    bench.answer(tokens(15, token=0))
    bench.admit()
    bench.answer(tokens(20, token=1))
    bench.answer([2])
    assert bench.admitted() == []


def test_those_that_were_passed_keep_their_order() -> None:
    bench = Bench(8, max_passes=4)
    holder = bench.answer(tokens(15, token=0))
    bench.admit()
    long = [bench.answer(tokens(17, token=1)), bench.answer(tokens(18, token=2))]
    short = bench.answer([2])
    assert bench.admitted() == [short]
    bench.scheduler.end(holder)
    assert bench.admitted() == [long[0]]
    bench.scheduler.end(long[0])
    assert bench.admitted() == [long[1]]


def test_the_bounded_queue_refuses_one_more_as_overloaded() -> None:
    bench = Bench(max_waiting=2)
    bench.answer([1])
    bench.answer([1])
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        bench.answer([1])
    bench.admit()
    bench.answer([1])
    assert (bench.scheduler.running, bench.scheduler.waiting) == (2, 1)


def test_a_waiting_sequence_can_be_taken_out() -> None:
    bench = Bench(max_num_seqs=1)
    first, second = bench.answer([1]), bench.answer([2])
    bench.admit()
    bench.scheduler.end(second)
    bench.scheduler.end(second)
    bench.scheduler.end(first)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (0, 0)
    assert bench.is_clean()


# Budgets


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.answer(tokens(23))
    bench.admit()
    assert [(start, end) for _ in range(4) for _, start, end in bench.planned()] == [
        (0, 10),
        (10, 20),
        (20, 23),
        (23, 24),
    ]


def test_running_answers_come_before_chunks_of_prompts() -> None:
    bench = Bench(max_num_batched_tokens=8)
    talker = bench.answer(tokens(2))
    bench.admit()
    bench.step()
    reader = bench.answer(tokens(30, token=2))
    late = bench.answer([3])
    bench.admit()
    assert bench.planned() == [(talker, 2, 3), (late, 0, 1), (reader, 0, 6)]


def test_prompts_are_limited_only_while_a_stream_runs() -> None:
    bench = Bench(max_num_batched_tokens=64)
    budget = Budget(0.0, StepCost(step_s=1.0, prompt_token_s=1.0), 64)
    reader = bench.answer(tokens(100, token=2))
    bench.admit()
    assert bench.planned(budget) == [(reader, 0, 64)]
    talker = bench.answer([3])
    bench.admit()
    assert bench.planned(budget) == [(talker, 0, 1), (reader, 64, 64 + MIN_PROMPT_TOKENS)]
    bench.scheduler.end(talker)
    assert bench.planned(budget) == [(reader, 80, 100)]


def test_chunks_of_several_prompts_share_what_streams_leave() -> None:
    bench = Bench()
    budget = Budget(1.0, StepCost(step_s=0.4, stream_s=0.1, prompt_token_s=0.02), 512)
    talker, one, other = bench.answer([1]), bench.answer(tokens(20, token=2)), bench.answer(tokens(30, token=3))
    bench.admit()
    assert bench.planned(budget) == [(talker, 0, 1), (one, 0, 20), (other, 0, 5)]


def test_the_last_tokens_of_a_prompt_pass_longer_ones() -> None:
    """After a pull only the tail is left: its answer does not wait for another prompt's chunks."""
    bench = Bench(max_num_batched_tokens=8)
    reader, tail = bench.answer(tokens(30, token=2)), bench.answer(tokens(3, token=3))
    bench.admit()
    assert bench.planned() == [(tail, 0, 3), (reader, 0, 5)]


def test_aligned_chunks_end_on_block_boundaries_whatever_the_budget_leaves() -> None:
    bench = Bench(of=limits(BLOCK, align_chunks=True), max_num_batched_tokens=10)
    one, other = bench.prefill(tokens(12, token=1)), bench.prefill(tokens(12, token=2))
    bench.admit()
    assert bench.planned() == [(one, 0, 8)]
    assert bench.planned() == [(one, 8, 12), (other, 0, 4)]
    assert bench.planned() == [(other, 4, 12)]


def test_a_budget_below_one_block_still_computes_aligned_jobs() -> None:
    bench = Bench(of=limits(BLOCK, align_chunks=True), max_num_batched_tokens=3)
    job = bench.prefill(tokens(8))
    bench.admit()
    assert [(start, end) for _ in range(3) for _, start, end in bench.planned()] == [(0, 3), (3, 6), (6, 8)]
    assert bench.pool.hits(job.block_hashes) == 2


def test_a_job_without_sampling_never_samples_and_stops_when_it_is_computed() -> None:
    bench = Bench()
    job = bench.prefill(tokens(8))
    bench.admit()
    assert bench.step() == []
    assert job.computed == 8
    assert bench.scheduler.plan() is None


def test_queued_tokens_are_those_known_and_not_computed() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=1)
    bench.answer(tokens(10))
    bench.answer(tokens(5))
    assert bench.scheduler.load.queued_tokens == 15
    bench.admit()
    bench.step()
    assert bench.scheduler.load.queued_tokens == 7


def test_blocks_that_a_pull_or_another_sequence_is_writing_are_not_queued() -> None:
    bench = Bench(max_num_batched_tokens=BLOCK)
    first, second = bench.answer(tokens(3 * BLOCK + 1)), bench.answer(tokens(3 * BLOCK + 2))
    bench.admit()
    assert bench.scheduler.load.queued_tokens == 3 * BLOCK + 3, "equal blocks are computed once for both"
    pull = SessionId(99)
    for page in first.pages[1:3]:
        bench.pool.assign_writer(page, pull)
    assert bench.scheduler.load.queued_tokens == BLOCK + 3
    bench.pool.fill(first.pages[1])
    step = bench.scheduler.plan()
    assert step is not None
    assert [chunk.sequence for chunk in step.chunks] == [first]
    assert bench.scheduler.load.queued_tokens == BLOCK + 3, "the first block is in a step"
    bench.pool.clear_writer(first.pages[2])
    assert bench.scheduler.load.queued_tokens == 2 * BLOCK + 3, "the pull failed"
    bench.scheduler.end(second)
    assert bench.scheduler.load.queued_tokens == 2 * BLOCK + 1


# The tail


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_prompt_whose_blocks_are_all_here_reruns_its_last_token_alone_and_writes_nothing(length: int) -> None:
    bench = Bench()
    bench.finish(bench.answer(tokens(length), SamplingParams(seed=0, max_tokens=1)))
    written = bench.runner.computed_tokens
    sequence = bench.answer(tokens(length))
    assert bench.admit()[0].missing == []
    step = bench.scheduler.plan()
    assert step is not None
    assert step.batch.positions.tolist() == [length - 1]
    assert step.batch.context_lens.tolist() == [length]
    assert step.batch.write_slots.tolist() == [bench.pool.total * BLOCK]
    emissions = bench.scheduler.update(step, bench.runner.run(step))
    assert [emission.sequence for emission in emissions] == [sequence]
    assert bench.runner.computed_tokens == written


def test_a_prompt_with_a_tail_computes_the_tail_alone() -> None:
    bench = Bench()
    bench.finish(bench.answer(tokens(8), SamplingParams(seed=0, max_tokens=1)))
    sequence = bench.answer([*tokens(8), 2, 3])
    bench.admit()
    assert bench.planned() == [(sequence, 8, 10)]


def test_a_sequence_that_goes_on_from_emitted_tokens_answers_as_if_it_had_never_moved() -> None:
    params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    whole, _ = answer_alone(tokens(6), params, 4096)
    bench = Bench()
    sequence = answering(1, [*tokens(6), *whole[:7]], params, BLOCK)
    sequence.prompt_tokens = 6
    bench.scheduler.enqueue(sequence)
    answer, finish = bench.finish(sequence)
    assert (answer, finish) == (whole, FinishReason.LENGTH)
