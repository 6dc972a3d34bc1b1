"""Many equal steps at once are as good as one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence as ListOf

import pytest

from tests.unit.scheduler.symbolic import answering, limits
from tools.simulate.fleet.worker.steps import TOKEN, repeats, run_ahead
from twostroke.base.ids import BlockHash, PageId
from twostroke.config import ScheduleConfig
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import StepResult
from twostroke.scheduler.batching import Step
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence

BLOCK = 4


class Quiet:
    def stored(self, names: ListOf[BlockHash]) -> None: ...

    def removed(self, names: ListOf[BlockHash]) -> None: ...

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None: ...

    def forgotten(self, block_hash: BlockHash) -> None: ...

    def new_writers(self, pages: ListOf[PageId]) -> None: ...


class Worker:
    """One of two that are asked for the same."""

    def __init__(self, pages: int) -> None:
        self.pool = BlockPool(pages, Quiet())
        self.scheduler = Scheduler(self.pool, ScheduleConfig(max_num_batched_tokens=24), limits(BLOCK))
        self.sequences: list[Sequence] = []
        self.ended: list[tuple[int, int]] = []
        self.may_admit_more = False

    def ask(self, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True)
        sequence = answering(len(self.sequences), prompt, params, BLOCK)
        self.scheduler.enqueue(sequence)
        self.sequences.append(sequence)

    def plan(self) -> Step | None:
        admitted = self.scheduler.admit()
        step = self.scheduler.plan()
        preempted = self.scheduler.take_preempted()
        self.may_admit_more = bool(preempted or (admitted and self.scheduler.waiting))
        return step

    def repeats(self, step: Step) -> int:
        return 0 if self.may_admit_more else repeats(step, BLOCK)

    def finish(self, step: Step) -> None:
        samples = sum(chunk.samples for chunk in step.chunks)
        for emission in self.scheduler.update(step, StepResult((SampledToken(TOKEN),) * samples, 0.0)):
            if emission.finish is not None:
                self.ended.append((self.sequences.index(emission.sequence), emission.sequence.answer_tokens))

    def state(self) -> object:
        self.pool.check_integrity()
        return [
            (list(s.known), list(s.block_hashes), list(s.pages), s.computed, s.preemptions, s.ended)
            for s in self.sequences
        ], self.ended


@pytest.mark.parametrize("seed", range(30))
def test_running_ahead_is_planning_and_settling_as_often(seed: int) -> None:
    draws = random.Random(seed)
    pages = draws.choice([12, 20, 60])
    single, ahead = Worker(pages), Worker(pages)
    skipped = 0
    for turn in range(400):
        if turn < 60 and draws.random() < 0.2:
            prompt = [draws.randrange(3) for _ in range(draws.randrange(1, 3 * BLOCK + 2))]
            most = draws.randrange(1, 25)
            single.ask(prompt, most)
            ahead.ask(prompt, most)
        step = ahead.plan()
        if step is None:
            assert single.plan() is None
            continue
        times = draws.randint(0, ahead.repeats(step))
        for _ in range(times):
            one = single.plan()
            assert one is not None
            assert [single.sequences.index(chunk.sequence) for chunk in one.chunks] == [
                ahead.sequences.index(chunk.sequence) for chunk in step.chunks
            ]
            single.finish(one)
        one = single.plan()
        assert one is not None
        single.finish(one)
        ahead.finish(run_ahead(step, times))
        skipped += times
        assert single.state() == ahead.state()
    assert all(sequence.ended for sequence in ahead.sequences)
    assert skipped


def test_a_step_with_more_than_streams_is_not_repeated() -> None:
    worker = Worker(60)
    worker.ask([1] * 9, 20)
    step = worker.plan()
    assert step is not None
    assert repeats(step, BLOCK) == 0


def test_the_last_of_repeated_steps_may_fill_a_block_or_end_an_answer() -> None:
    worker = Worker(60)
    worker.ask([1] * BLOCK, 20)
    for _ in range(2):
        step = worker.plan()
        assert step is not None
        worker.finish(step)
    step = worker.plan()
    assert step is not None
    assert step.chunks[0].start == BLOCK + 1
    assert repeats(step, BLOCK) == BLOCK - 2
