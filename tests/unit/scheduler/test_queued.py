"""How long everything queued will take: predicted, and then drained."""

from __future__ import annotations

from random import Random

import pytest

from tests.unit.scheduler.bench import BLOCK, Bench, tokens
from tests.unit.scheduler.symbolic import limits
from twostroke.base.ids import SessionId
from twostroke.scheduler.cost import Budget, Queued, StepCost, StepTerms
from twostroke.scheduler.sequence import Sequence

COST = StepCost(0.01, 5e-4, 1e-5, prompt_step_s=0.004, prompt_token_s=0.001, prompt_pair_s=2e-5)
BUDGET = Budget(0.06, COST, 1000)


def predicted_s(bench: Bench) -> float:
    return BUDGET.drain_s(bench.scheduler.load.queued(), bench.scheduler.step_tokens)


def drained_s(bench: Bench, jobs: list[Sequence]) -> float:
    """Returns the seconds until no prompt token is left to compute, at each step's cost. Jobs end when they are
    computed."""
    passed_s = 0.0
    while True:
        bench.admit()
        if not bench.scheduler.load.queued().tokens:
            return passed_s
        step = bench.scheduler.plan(BUDGET)
        assert step is not None
        passed_s += COST.of(StepTerms.of(step.batch))
        bench.scheduler.update(step, bench.runner.run(step))
        for job in jobs:
            if job.computed == len(job.known):
                bench.scheduler.end(job)


def prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(1, 256) for _ in range(length)]


@pytest.mark.parametrize("seed", range(5))
def test_a_prefill_workers_queue_takes_as_long_as_predicted(seed: int) -> None:
    random = Random(seed)
    bench = Bench(2000, of=limits(BLOCK, align_chunks=True), max_num_batched_tokens=64, max_num_seqs=5)
    shared = prompt(random, 20 * BLOCK)
    bench.finish_prefill(shared)
    owns = [prompt(random, BLOCK * random.randrange(1, 60)) for _ in range(12)]
    jobs = [bench.prefill(own if number % 3 else shared + own) for number, own in enumerate(owns)]
    bench.admit()
    assert bench.scheduler.waiting == 7
    assert predicted_s(bench) == pytest.approx(drained_s(bench, jobs), rel=0.1)
    assert predicted_s(bench) == 0.0


@pytest.mark.parametrize("streams", [0, 1, 8])
def test_prompts_that_a_decode_worker_computes_beside_streams_take_as_long_as_predicted(streams: int) -> None:
    random = Random(streams)
    bench = Bench(2000, max_num_batched_tokens=64)
    for _ in range(streams):
        bench.answer(prompt(random, 30))
    while bench.admit() or bench.scheduler.load.queued().tokens:
        bench.step()
    jobs = [bench.prefill(prompt(random, BLOCK * 40)) for _ in range(3)]
    bench.admit()
    assert bench.scheduler.load.queued().streams == streams
    assert predicted_s(bench) == pytest.approx(drained_s(bench, jobs), rel=0.1)


def test_equal_prompts_are_computed_once_and_so_predicted() -> None:
    bench, once = Bench(max_num_batched_tokens=64), Bench(max_num_batched_tokens=64)
    for _ in range(5):
        bench.prefill(tokens(10 * BLOCK))
    once.prefill(tokens(10 * BLOCK))
    bench.admit()
    once.admit()
    assert bench.scheduler.load.queued() == once.scheduler.load.queued() == Queued(40, 800.0, 0, 0)


def test_half_of_a_prompt_in_a_step_is_still_queued_and_attends_to_what_lies_before() -> None:
    bench = Bench(max_num_batched_tokens=6)
    bench.prefill(tokens(4 * BLOCK))
    bench.admit()
    bench.step()
    assert bench.scheduler.load.queued() == Queued(10, 10 * (6 + 5.0), 0, 0)
    assert bench.scheduler.plan() is not None
    assert bench.scheduler.load.queued() == Queued(10, 10 * (6 + 5.0), 0, 0)


def test_what_waits_owes_what_is_neither_cached_nor_to_be_pulled() -> None:
    bench = Bench(max_num_seqs=1)
    bench.finish_prefill(tokens(5 * BLOCK))
    running = bench.prefill(tokens(2 * BLOCK, token=2))
    bench.admit()
    bench.prefill(tokens(8 * BLOCK))
    assert bench.scheduler.load.queued_tokens == (2 + 3) * BLOCK
    bench.answer(tokens(5 * BLOCK))
    assert bench.scheduler.load.queued_tokens == (2 + 3) * BLOCK + 1, "the last token runs again"
    bench.scheduler.end(running)
    assert bench.scheduler.load.queued_tokens == 3 * BLOCK + 1
    pulled = bench.sequence(tokens(3 * BLOCK + 2, token=3))
    pulled.pulled_blocks = 3
    bench.scheduler.enqueue(pulled)
    assert bench.scheduler.load.queued_tokens == 3 * BLOCK + 3
    bench.scheduler.end(pulled)
    assert bench.scheduler.load.queued_tokens == 3 * BLOCK + 1


def test_a_pull_takes_its_blocks_off_the_queue_and_gives_back_what_it_leaves() -> None:
    bench = Bench()
    sequence = bench.prefill(tokens(4 * BLOCK))
    bench.admit()
    for page in sequence.pages[:3]:
        bench.pool.assign_writer(page, SessionId(99))
    assert bench.scheduler.load.queued() == Queued(BLOCK, BLOCK * (3 * BLOCK + BLOCK / 2), 0, 0)
    bench.pool.fill(sequence.pages[0])
    bench.pool.clear_writer(sequence.pages[1])
    bench.pool.clear_writer(sequence.pages[2])
    assert bench.scheduler.load.queued().tokens == 3 * BLOCK


def test_nothing_queued_takes_no_time_and_unknown_costs_predict_none() -> None:
    assert BUDGET.drain_s(Queued(streams=5, context_tokens=100), 64) == 0.0
    assert Budget(0.06, StepCost(), 1000).drain_s(Queued(100, 5000.0), 64) == 0.0
