"""A step costs what it computes, however many prompts are open and however long they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.unit.scheduler.bench import BLOCK, FOREVER, Bench, tokens
from tests.unit.scheduler.features import score
from tests.unit.scheduler.symbolic import answering, limits, pulling
from tests.unit.scheduler.windows.test_scheduler_windows import WindowBench
from twostroke.scheduler.batch import MOST_EXTRA_LOGITS
from twostroke.scheduler.progress import BlockProgress


class Counting:
    """Counts the questions of a scheduler about its sequences."""

    def __init__(self, progress: BlockProgress) -> None:
        self._progress = progress
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._progress, name)
        if callable(found):
            self.asked[name] += 1
        return found


def watched(bench: Bench) -> Counter[str]:
    """Returns the number of questions from now on."""
    scheduler = bench.scheduler
    counting = Counting(scheduler._progress)
    for each in (scheduler, scheduler._chooser, scheduler._running, scheduler.load):
        each._progress = counting  # type: ignore[attr-defined, assignment]
    return counting.asked


def asked_by_a_step(open_prompts: int, blocks: int, *, are_pulled: bool) -> Counter[str]:
    bench = Bench(open_prompts * (blocks + 1) + 8, of=limits(BLOCK, align_chunks=True), max_num_seqs=open_prompts + 1)
    bench.scheduler.step_tokens = 2 * BLOCK
    for number in range(open_prompts):
        sequence = bench.prefill(tokens(blocks * BLOCK, token=number + 1))
        bench.admit()
        if are_pulled and number:
            for page in sequence.pages:
                bench.pool.assign_writer(page, pulling(1000 + number))
    bench.step()
    asked = watched(bench)
    bench.step()
    bench.scheduler.load.queued()
    assert bench.scheduler.load.prompts == open_prompts
    return asked


@pytest.mark.parametrize("are_pulled", [False, True])
def test_a_step_asks_for_what_it_computes_alone(are_pulled: bool) -> None:
    few = asked_by_a_step(2, 8, are_pulled=are_pulled)
    assert few["begin_writing"] == 1
    assert asked_by_a_step(60, 8, are_pulled=are_pulled) == few
    assert asked_by_a_step(2, 200, are_pulled=are_pulled) == few


def test_where_pages_do_not_tell_of_everything_a_step_looks_once_at_each_prompt() -> None:
    open_prompts, blocks = 12, 8
    bench = WindowBench(slots=600, window=8, pages=open_prompts * (blocks + 1) + 8, max_num_batched_tokens=2 * BLOCK)
    for number in range(open_prompts):
        bench.prefill(tokens(blocks * BLOCK, token=number + 1))
        bench.admit()
    bench.step()
    asked, load = watched(bench), bench.scheduler.load
    for _ in range(3):
        assert load.prompts == open_prompts
        load.queued()
    assert asked["recomputed_tokens"] <= open_prompts
    asked.clear()
    step = bench.scheduler.plan()
    assert step is not None
    for _ in range(3):
        load.queued()
    assert asked["catch_up"] == open_prompts
    assert asked["recomputed_tokens"] <= open_prompts + 1, "that which runs is looked at before and after it was chosen"


def test_a_scored_prompt_goes_on_beside_streams_that_leave_less_than_a_block() -> None:
    bench = Bench(100, of=limits(BLOCK, align_chunks=True), max_num_seqs=64)
    bench.scheduler.step_tokens = 4 * BLOCK
    for number in range(3 * BLOCK + 1):
        bench.answer([number % 7, number // 7, 1], FOREVER)
        bench.admit()
        bench.step()
    scored = answering(1000, tokens(5 * BLOCK), FOREVER, BLOCK)
    score(scored)
    bench.scheduler.enqueue(scored)
    bench.admit()
    bench.step()
    assert 0 < scored.computed < BLOCK


def test_all_scored_prompts_of_a_step_share_its_logits() -> None:
    bench = Bench(100, of=limits(BLOCK), max_num_seqs=4)
    bench.scheduler.step_tokens = 16 * MOST_EXTRA_LOGITS
    for number in range(2):
        scored = answering(1000 + number, tokens(MOST_EXTRA_LOGITS - BLOCK, token=number + 1), FOREVER, BLOCK)
        score(scored)
        bench.scheduler.enqueue(scored)
    bench.admit()
    assert [end - start for _, start, end in bench.planned()] == [MOST_EXTRA_LOGITS - BLOCK, BLOCK]


def claims_of_waiting(steps: int, *, ends: bool) -> int:
    """Returns how often the pool is asked for pages of a prompt that finds none, in so many steps of another one."""
    blocks = 40
    bench = Bench(blocks + 8, of=limits(BLOCK, align_chunks=True), max_num_seqs=4)
    bench.scheduler.step_tokens = BLOCK
    running = bench.prefill(tokens(blocks * BLOCK, token=1))
    bench.admit()
    waiting = bench.prefill(tokens(blocks * BLOCK, token=2))
    claim, claims = bench.pool.claim, 0

    def counted(*args: Any, **changes: Any) -> Any:
        nonlocal claims
        claims += 1
        return claim(*args, **changes)

    bench.pool.claim = counted  # type: ignore[method-assign]
    for _ in range(steps):
        bench.admit()
        bench.step()
    assert bench.scheduler.waiting == 1
    if ends:
        bench.scheduler.end(running)
        bench.admit()
        assert waiting.pages
    return claims


def test_a_waiting_prompt_is_claimed_again_only_when_enough_pages_have_been_released() -> None:
    assert claims_of_waiting(2, ends=False) == claims_of_waiting(30, ends=False) == 1
    assert claims_of_waiting(30, ends=True) == 2
