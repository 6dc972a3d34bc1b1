"""Forms whose tokens see their own block exact: it is there for every row, and let go of in time."""

from __future__ import annotations

import random

import pytest

from tests.unit.scheduler.bench import BLOCK, FOREVER, Bench, tokens
from twostroke.request import SamplingParams
from twostroke.scheduler.scheduler import Step


class ExactBlocks:
    """Which positions of which page are kept exact, as `twostroke.kernels.page_forms.exact_pages` keeps them."""

    def __init__(self) -> None:
        self.kept: dict[int, set[int]] = {}

    def run(self, step: Step) -> None:
        """Checks that every row finds its own block up to itself, in its own step or kept from an earlier one."""
        for page in step.batch.released:
            self.kept.pop(page, None)
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.end):
                page, first = chunk.sequence.pages[position // BLOCK], position // BLOCK * BLOCK
                if position == first:
                    self.kept[page] = set()
                own = self.kept.setdefault(page, set())
                own.add(position)
                assert own >= set(range(first, position + 1)), "a row sees a block that is not exact"


def run(bench: Bench, step: Step, exact: ExactBlocks) -> None:
    exact.run(step)
    bench.scheduler.update(step, bench.runner.run(step))


def run_in_parts(bench: Bench, step: Step, exact: ExactBlocks, draw: random.Random) -> None:
    """Lets a step fail before or after it was run, then runs its sequences one by one, of which some fail again."""
    if draw.random() < 0.5:
        exact.run(step)
    for chunk in step.chunks:
        part = bench.scheduler.step_of([chunk])
        if draw.random() < 0.7:
            run(bench, part, exact)
            continue
        if draw.random() < 0.5:
            exact.run(part)
        bench.scheduler.abort_step(part)


def test_a_prompt_whose_blocks_are_all_cached_runs_its_last_block_again() -> None:
    bench = Bench(has_exact_blocks=True)
    bench.finish_prefill(tokens(3 * BLOCK))
    sequence = bench.answer(tokens(3 * BLOCK))
    assert bench.admitted() == [sequence]
    assert bench.planned() == [(sequence, 2 * BLOCK, 3 * BLOCK)]
    assert bench.planned() == [(sequence, 3 * BLOCK, 3 * BLOCK + 1)]


def test_a_block_that_runs_again_is_not_cut_by_what_streams_leave() -> None:
    bench = Bench(has_exact_blocks=True, max_num_batched_tokens=2)
    stream = bench.answer(tokens(1, 2))
    bench.admit()
    bench.planned()
    bench.finish_prefill(tokens(3 * BLOCK))
    sequence = bench.answer(tokens(3 * BLOCK))
    bench.admit()
    assert (sequence, 2 * BLOCK, 3 * BLOCK) in bench.planned()
    assert stream in {each for each, _, _ in bench.planned()}


def test_what_a_failed_step_was_to_let_go_of_is_told_to_the_next_one_until_one_succeeds() -> None:
    bench = Bench(has_exact_blocks=True)
    gone, others = bench.answer(tokens(2, 1)), [bench.answer(tokens(2, seed)) for seed in (2, 3)]
    bench.admit()
    bench.planned()
    released = set(gone.pages)
    bench.scheduler.end(gone)
    step = bench.scheduler.plan()
    assert step is not None
    parts = [bench.scheduler.step_of([chunk]) for chunk in step.chunks]
    assert [released <= set(each.batch.released) for each in (step, *parts)] == [True] * 3
    bench.scheduler.update(parts[0], bench.runner.run(parts[0]))
    assert not bench.scheduler.step_of(parts[1].chunks).batch.released, "the first part has let go of them"
    bench.scheduler.abort_step(parts[1])
    step = bench.scheduler.plan()
    assert step is not None
    assert [chunk.sequence for chunk in step.chunks] == others[:1]
    assert not released & set(step.batch.released)
    assert step.batch.released, "the failed sequence has left something"
    bench.scheduler.abort_step(step)


@pytest.mark.parametrize("seed", range(30))
def test_every_row_finds_its_own_block_and_little_is_kept(seed: int) -> None:
    """Prompts that share prefixes, in chunks of any size, some preempted and some ended in the middle."""
    draw = random.Random(seed)
    bench = Bench(draw.choice((12, 20, 64)), has_exact_blocks=True, max_num_batched_tokens=draw.choice((1, 3, 7, 64)))
    exact, open_ = ExactBlocks(), []
    for _ in range(150):
        if draw.random() < 0.2:
            prompt = tokens(draw.randint(1, 6 * BLOCK), draw.choice((1, 1, 2)))
            params = SamplingParams(seed=draw.randint(0, 3), max_tokens=draw.randint(1, 12), ignore_eos=True)
            open_.append(bench.answer(prompt, draw.choice((params, FOREVER))))
        if open_ and draw.random() < 0.1:
            bench.scheduler.end(open_.pop(draw.randrange(len(open_))))
        bench.admit()
        step = bench.scheduler.plan()
        if step is None:
            continue
        run_in_parts(bench, step, exact, draw) if draw.random() < 0.2 else run(bench, step, exact)
        open_ = [each for each in open_ if not each.ended]
        bench.pool.check_integrity()
    for each in open_:
        bench.scheduler.end(each)
    last = bench.answer(tokens(2, 3))
    bench.admit()
    step = bench.scheduler.plan()
    assert step is not None
    exact.run(step)
    assert set(exact.kept) == set(last.pages[:1]), "something is kept of sequences that have ended"
