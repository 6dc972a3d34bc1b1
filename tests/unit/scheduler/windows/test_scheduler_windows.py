"""A scheduler over window parts of blocks: what is always admitted, and what is handed on between sequences."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.bench import BLOCK, Bench, tokens
from tests.unit.scheduler.features import all_branches, released_pages
from tests.unit.scheduler.symbolic import (
    ExactWindowedRunner,
    SymbolicMemory,
    WindowedRunner,
    answer_alone,
    pulling,
)
from twostroke.base.ids import PageId
from twostroke.config import ScheduleConfig
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.shape import WindowShape
from twostroke.kv_cache.windows.window_group import WindowGroup, window_group, window_group_of
from twostroke.request import SamplingParams
from twostroke.scheduler.scheduler import Scheduler

BRIEF = SamplingParams(seed=0, max_tokens=3, ignore_eos=True)


class WindowBench(Bench):
    """A bench whose layers with a window keep their parts of blocks apart."""

    def __init__(
        self, *, slots: int, window: int, pages: int = 200, has_exact_blocks: bool = False, **config: int
    ) -> None:
        super().__init__(pages)
        self.parts = SymbolicMemory(0, BLOCK)
        shape = WindowShape(PageId(pages), slots, window, BLOCK, has_exact_blocks)
        self.pool = BlockPool(pages, self.memory, window_group(shape, self.parts))
        runner = ExactWindowedRunner if has_exact_blocks else WindowedRunner
        self.runner = runner(self.memory, self.pool, self.parts, window)
        self.branches = all_branches(self.pool, self.limits, has_exact_blocks=has_exact_blocks)
        self.scheduler = Scheduler(self.pool, ScheduleConfig(**config), self.limits, branches=self.branches)

    @property
    def windows(self) -> WindowGroup:
        windows = window_group_of(self.pool)
        assert windows is not None
        return windows

    def cache_pinned(self, prompt: list[int]) -> None:
        hashes = block_hashes_of(prompt, BLOCK)
        self.pool.pin(hashes)
        claim = self.pool.claim(hashes, root_hash(), 0)
        assert claim is not None
        parts = self.windows.share_last(hashes)
        for page in claim.pages:
            self.pool.fill(page)
        for slot in parts.values():
            self.windows.fill(slot)
        self.windows.unshare(parts.values())
        self.pool.release(claim.pages)

    def arrive(self, slots: dict[int, PageId]) -> None:
        """A pull brings the window parts of these blocks of a prompt of ones."""
        for block, slot in slots.items():
            self.windows.assign_writer(slot, pulling(1))
            self.parts.put(slot, [(block * BLOCK + offset, 1) for offset in range(BLOCK)])
            self.windows.fill(slot)


@pytest.mark.parametrize("window", [1, 4, 8, 30])
@pytest.mark.parametrize("spare", [0, 1, 5, 40])
@pytest.mark.parametrize("pulled", [False, True])
def test_as_many_pins_as_are_taken_leave_room_for_the_longest_sequence(window: int, spare: int, pulled: bool) -> None:
    slots = WindowShape(PageId(0), 0, window, BLOCK).least_slots + spare
    bench = WindowBench(slots=slots, window=window, max_num_batched_tokens=64)
    for number in range(64):
        prompt = [number % 8, number // 8, 2, 3] * 2
        if bench.windows.has_room_to_pin(block_hashes_of(prompt, BLOCK)):
            bench.cache_pinned(prompt)
    sequence = bench.sequence(tokens(90), BRIEF)
    sequence.pulled_blocks = len(sequence.block_hashes) if pulled else 0
    bench.scheduler.enqueue(sequence)
    assert bench.finish(sequence)[0] == answer_alone(tokens(90), BRIEF, 4096)[0]


@pytest.mark.parametrize("has_exact_blocks", [False, True])
def test_a_part_that_a_sequence_had_begun_to_compute_again_is_free_once_it_goes_on_behind_it(
    has_exact_blocks: bool,
) -> None:
    bench = WindowBench(slots=40, window=8, has_exact_blocks=has_exact_blocks, max_num_batched_tokens=10)
    prompt = tokens(41)
    bench.finish_prefill(prompt[:40])
    bench.windows.forget_cached()  # all pages are here, and no window part
    first, second = bench.sequence(prompt, BRIEF), bench.sequence(prompt, BRIEF)
    for sequence in (first, second):
        sequence.pulled_blocks = len(sequence.block_hashes)
    bench.scheduler.enqueue(first)
    bench.admit()
    assert bench.planned() == [(first, 0, 10)]  # nobody pulls for it: it is in the midst of block 2
    bench.scheduler.enqueue(second)
    bench.admit()
    assert second.further is not None
    bench.arrive({block: second.further.slots[block] for block in bench.windows.shape.tail(10)})
    for sequence in (first, second):
        if not sequence.ended:
            bench.finish(sequence)
        assert sequence.known[41:] == answer_alone(prompt, BRIEF, 4096)[0]
    assert bench.windows.count(PageState.QUARANTINED) == 0
    assert bench.windows.has_room(40)
    if isinstance(bench.runner, ExactWindowedRunner):
        assert bench.runner.unfinished <= released_pages(bench.branches), "what is kept of block 2 never goes"


def test_a_question_about_the_load_releases_nothing_that_a_step_in_flight_writes() -> None:
    bench = WindowBench(slots=40, window=8, max_num_batched_tokens=10)
    prompt = tokens(41)
    bench.finish_prefill(prompt[:40])
    bench.windows.forget_cached()
    sequence = bench.sequence(prompt, BRIEF)
    sequence.pulled_blocks = 10
    bench.scheduler.enqueue(sequence)
    bench.admit()
    step = bench.scheduler.plan()
    assert step is not None
    assert sequence.further is not None
    slots = dict(sequence.further.slots)
    bench.arrive({block: slots[block] for block in bench.windows.shape.tail(10)})  # all that it needs is here
    load = bench.scheduler.load
    assert (load.queued().tokens, load.prompts, len(list(load.due_prompts()))) == (1, 1, 0)
    assert (sequence.computed, sequence.further.slots) == (0, slots)
    bench.scheduler.update(step, bench.runner.run(step))
    assert bench.finish(sequence)[0] == answer_alone(prompt, BRIEF, 4096)[0]


def test_what_is_kept_of_a_block_whose_part_is_computed_again_stays_when_one_that_waits_for_it_goes() -> None:
    bench = WindowBench(slots=40, window=8, has_exact_blocks=True, max_num_batched_tokens=10)
    prompt = tokens(41)
    bench.finish_prefill(prompt[:40])
    bench.windows.forget_cached()
    first = bench.answer(prompt, BRIEF)
    bench.admit()
    second = bench.answer(prompt, BRIEF)
    bench.admit()
    assert bench.planned() == [(first, 0, 10)]
    bench.scheduler.end(second)
    assert bench.finish(first)[0] == answer_alone(prompt, BRIEF, 4096)[0]  # every row finds its own block exact
