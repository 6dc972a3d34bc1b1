"""Pages that several sequences want: written by others, computed once, taken over, preempted."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.scheduler.bench import BLOCK, Bench, tokens
from tests.unit.scheduler.derived import check_kept
from tests.unit.scheduler.symbolic import (
    answer_alone,
    limits,
    prefilling,
    pulling,
)
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.request import FinishReason, SamplingParams

# Pages that others write


def test_nothing_is_computed_for_blocks_that_a_pull_writes() -> None:
    bench = Bench()
    sequence = bench.answer([*tokens(8), 2])
    (admission,) = bench.admit()
    for index, _ in admission.missing:
        bench.pool.assign_writer(sequence.pages[index], pulling(1))
    assert bench.scheduler.plan() is None
    for index, page in enumerate(sequence.pages[:2]):
        bench.memory.put(page, [(index * BLOCK + offset, 1) for offset in range(BLOCK)])
        bench.pool.fill(page)
    assert bench.planned() == [(sequence, 8, 9)]


def test_a_chunk_ends_before_a_block_that_a_pull_writes() -> None:
    bench = Bench()
    sequence = bench.answer([*tokens(12), 2])
    bench.admit()
    bench.pool.assign_writer(sequence.pages[1], pulling(1))
    assert bench.planned() == [(sequence, 0, 4)]
    assert bench.scheduler.plan() is None, "the next block comes from the pull"
    bench.memory.put(sequence.pages[1], [(4 + offset, 1) for offset in range(BLOCK)])
    bench.pool.fill(sequence.pages[1])
    assert bench.planned() == [(sequence, 8, 13)]


@pytest.mark.parametrize("step_tokens", [7, 8])
def test_a_resumed_answer_whose_last_chunk_leaves_one_hashed_token_becomes_a_stream(step_tokens: int) -> None:
    bench = Bench(of=limits(BLOCK, align_chunks=False))
    bench.scheduler.step_tokens = step_tokens
    sequence = bench.sequence(tokens(2 * BLOCK), SamplingParams(seed=0, max_tokens=30, ignore_eos=True))
    sequence.prompt_tokens = BLOCK  # the rest is answer
    bench.scheduler.enqueue(sequence)
    bench.admit()
    for _ in range(12):
        bench.step()
    assert len(sequence.known) > 4 * BLOCK, "it has grown over the ends of pages"
    check_kept(bench.scheduler, bench.pool, BLOCK)


@pytest.mark.parametrize("step_tokens", [5, 6, 7, 9])
def test_preempted_answers_become_streams_again(step_tokens: int) -> None:
    for pages, first, second in itertools.product((8, 9, 10, 11), (3, 5, 6, 7), (2, 3, 4, 5)):
        _answer_with_few_pages(step_tokens, pages, (first, second, 4))


def _answer_with_few_pages(step_tokens: int, pages: int, lengths: tuple[int, ...]) -> None:
    bench = Bench(pages, of=limits(BLOCK), max_num_seqs=3)
    bench.scheduler.step_tokens = step_tokens
    for number, length in enumerate(lengths):
        params = SamplingParams(seed=number, max_tokens=14 if number else 22, ignore_eos=True)
        bench.answer(tokens(length, token=number + 1), params)
    for _ in range(300):
        bench.admit()
        if bench.scheduler.running:
            bench.step()
            check_kept(bench.scheduler, bench.pool, BLOCK)
    assert not bench.scheduler.running
    assert not bench.scheduler.waiting


def test_what_a_failed_pull_left_missing_is_computed_up_to_what_it_brought() -> None:
    bench = Bench()
    sequence = bench.answer([*tokens(12), 2])
    bench.admit()
    pages = sequence.pages
    for page in pages[:3]:
        bench.pool.assign_writer(page, pulling(1))
    bench.memory.put(pages[1], [(4 + offset, 1) for offset in range(BLOCK)])
    bench.pool.fill(pages[1])
    bench.pool.clear_writer(pages[0])
    bench.pool.clear_writer(pages[2])
    assert bench.planned() == [(sequence, 0, 4)]
    assert bench.planned() == [(sequence, 8, 13)]


def test_equal_blocks_wanted_by_two_at_once_are_computed_once() -> None:
    bench = Bench()
    one, other = bench.answer([*tokens(12), 2]), bench.answer([*tokens(12), 3])
    bench.admit()
    assert bench.planned() == [(one, 0, 13)]
    assert bench.planned() == [(one, 13, 14), (other, 12, 13)]
    assert bench.runner.computed_tokens == 12 + 2 + 1


def test_equal_prefill_jobs_are_computed_once() -> None:
    bench = Bench(of=limits(BLOCK, align_chunks=True), max_num_batched_tokens=8)
    jobs = [bench.prefill(tokens(16)) for _ in range(5)]
    bench.admit()
    while (step := bench.scheduler.plan()) is not None:
        bench.scheduler.update(step, bench.runner.run(step))
    assert bench.runner.computed_tokens == 16
    assert all(job.computed == 16 for job in jobs)


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_who_waits_takes_over_when_the_computing_sequence_is_aborted_mid_block(is_in_flight: bool) -> None:
    bench = Bench(max_num_batched_tokens=6)
    computing, waiting = bench.answer([*tokens(8), 2]), bench.answer([*tokens(8), 3])
    bench.admit()
    step = bench.scheduler.plan()
    assert step is not None
    if is_in_flight:
        bench.scheduler.end(computing)
        assert bench.pool.writer(waiting.pages[1]) == computing.session
    bench.scheduler.update(step, bench.runner.run(step))
    bench.scheduler.end(computing)
    assert bench.pool.is_filled(waiting.pages[0])
    assert bench.pool.is_arriving(waiting.pages[1])
    assert bench.pool.writer(waiting.pages[1]) is None
    assert bench.planned() == [(waiting, 4, 9)]


def test_what_is_kept_of_an_unfinished_block_stays_when_one_that_waits_for_it_goes() -> None:
    bench = Bench(has_exact_blocks=True, max_num_batched_tokens=6)
    bench.answer([*tokens(8), 2])
    waiting = bench.answer([*tokens(8), 3])
    bench.admit()
    bench.step()
    bench.scheduler.end(waiting)
    bench.step()


def test_a_last_block_that_runs_again_does_not_wait_for_a_long_prompt() -> None:
    bench = Bench(has_exact_blocks=True, max_num_batched_tokens=8)
    bench.finish_prefill(tokens(8))
    long, cached = bench.answer(tokens(40, token=2)), bench.answer(tokens(8))
    bench.admit()
    assert bench.planned() == [(cached, 4, 8), (long, 0, 4)]


def test_the_pages_of_an_aborted_sequence_are_kept_until_its_step_has_settled() -> None:
    bench = Bench(4)
    sequence = bench.answer(tokens(15))
    bench.admit()
    step = bench.scheduler.plan()
    assert step is not None
    bench.scheduler.end(sequence)
    assert bench.pool.available == 0
    other = bench.answer([2])
    assert bench.admitted() == []
    assert bench.scheduler.update(step, bench.runner.run(step)) == []
    assert bench.is_clean()
    assert bench.admitted() == [other]


def test_a_step_that_failed_ends_its_sequences_and_reads_none_of_their_pages() -> None:
    bench = Bench(8, max_num_batched_tokens=9)
    first, second, third = bench.answer(tokens(4)), bench.answer(tokens(4, token=2)), bench.answer(tokens(8, token=3))
    bench.admit()
    step = bench.scheduler.plan()
    assert step is not None
    bench.scheduler.end(first)
    assert bench.scheduler.abort_step(step) == [second, third]
    assert bench.is_clean()
    assert bench.pool.count(PageState.CACHED) == 0
    assert bench.scheduler.plan() is None


# Preemption


def test_the_sequence_admitted_last_gives_its_pages_to_the_one_that_grows() -> None:
    bench = Bench(4)
    first, last = bench.answer(tokens(7)), bench.answer(tokens(7, token=2))
    bench.admit()
    for _ in range(2):
        bench.step()
    assert bench.planned() == [(first, 8, 9)]
    assert bench.scheduler.take_preempted() == [last]
    assert bench.scheduler.take_preempted() == []
    assert (last.pages, last.computed, len(last.known), last.preemptions) == ([], 0, 9, 1)
    assert bench.scheduler.waiting == 1


def test_a_preempted_sequence_resumes_with_what_is_still_cached_and_answers_the_same() -> None:
    params = SamplingParams(seed=1, max_tokens=9, ignore_eos=True)
    bench = Bench(5)
    first, last = bench.answer(tokens(7), params), bench.answer(tokens(7, token=2), params)
    bench.admit()
    while not last.preemptions:
        bench.step()
    bench.scheduler.end(first)
    (admission,) = bench.admit()
    assert admission.sequence is last
    assert last.computed == len(last.block_hashes) * BLOCK > 4
    assert last.hit_blocks == 0
    answer, finish = bench.finish(last)
    assert (answer, finish) == answer_alone(tokens(7, token=2), params, 4096)
    assert bench.is_clean()


def test_a_preempted_sequence_waits_first_in_line() -> None:
    bench = Bench(4, max_num_seqs=2, max_passes=0)
    bench.answer(tokens(7))
    last = bench.answer(tokens(7, token=2))
    bench.admit()
    patient = bench.answer([3])
    while not last.preemptions:
        bench.step()
    assert list(bench.scheduler._waiting) == [last, patient]


def test_preempted_sequences_wait_in_the_order_in_which_they_were_admitted() -> None:
    bench = Bench(6)
    _, second, last = (bench.answer(tokens(7, token=number)) for number in (1, 2, 3))
    bench.admit()
    while not second.preemptions:
        bench.step()
    assert bench.scheduler.take_preempted() == [last, second]
    assert bench.scheduler.waiting_sequences == (second, last)


def test_a_sequence_that_fills_the_whole_pool_runs_to_its_end() -> None:
    bench = Bench(4)
    params = SamplingParams(seed=0, max_tokens=9, ignore_eos=True)
    sequence = bench.answer(tokens(7), params)
    other = bench.answer(tokens(7, token=2), params)
    assert bench.finish(sequence)[1] is FinishReason.LENGTH
    assert bench.finish(other)[1] is FinishReason.LENGTH
    assert bench.is_clean()


def test_a_sequence_alone_that_finds_no_page_waits_until_a_reader_lets_go() -> None:
    bench = Bench(3)
    bench.finish(bench.answer(tokens(4, token=3), SamplingParams(seed=0, max_tokens=1)))
    hashes = prefilling(9, tokens(4, token=3), BLOCK).block_hashes
    pinned = list(bench.pool.share_filled(dict(enumerate(hashes))).values())
    sequence = bench.answer(tokens(7), SamplingParams(seed=0, max_tokens=4, ignore_eos=True))
    bench.admit()
    bench.step()
    bench.step()
    assert bench.scheduler.plan() is None
    assert bench.scheduler.take_preempted() == [sequence]
    assert bench.admitted() == []
    bench.pool.release(pinned)
    assert bench.finish(sequence)[1] is FinishReason.LENGTH
