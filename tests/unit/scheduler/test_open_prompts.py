"""A step costs what it computes, however many prompts are open and however long they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.unit.scheduler.bench import BLOCK, Bench, tokens
from tests.unit.scheduler.symbolic import limits, pulling
from twostroke.scheduler.progress import PageProgress


class Counting(PageProgress):
    """Counts the questions of a scheduler about its sequences."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.pool, BLOCK)
        self.asked: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_"):
            self.asked[name] += 1
        return found


def watched(bench: Bench) -> Counter[str]:
    """Returns the number of questions from now on."""
    scheduler = bench.scheduler
    counting = Counting(bench)
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
