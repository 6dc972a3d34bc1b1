"""What an overloaded server did, told from its answers."""

from __future__ import annotations

import dataclasses
import os

import psutil
import pytest

from tests.trials.bench.overload import memory
from tests.trials.bench.overload.verdict import Run, misses, run_of
from tools.bench.measure import Answer, Failure


def answer(sent_s: float, ended_s: float, failure: str = "") -> Answer:
    times = () if failure else (sent_s + (ended_s - sent_s) / 2, ended_s)
    return Answer(sent_s, ended_s, times, len(times), "ids", 8, 0, Failure(failure, "why") if failure else None)


def a_run(load: float = 1.0, goodput_per_s: float = 10.0, **own_mib: int) -> Run:
    run = run_of([answer(0, 1)], load=load, rate_per_s=1, begun_s=0, window_s=(0, 1), own_bytes={})
    held = {name: mib << 20 for name, mib in own_mib.items()}
    return dataclasses.replace(run, goodput_per_s=goodput_per_s, own_bytes=held)


def test_answers_are_whole_late_refused_or_failed() -> None:
    kinds = ["timeout", "http 504", "stream timeout_error", "http 429", "grpc RESOURCE_EXHAUSTED", "http 500"]
    answers = [answer(0.0, 1.0), answer(4.0, 6.0), *(answer(0.0, 0.1 * at, kind) for at, kind in enumerate(kinds))]
    run = run_of(answers, load=3, rate_per_s=9, begun_s=0.0, window_s=(2.0, 12.0), own_bytes={})
    assert run.ends == {"met": 2, "late": 3, "refused": 2, "failed": 1}
    assert run.goodput_per_s == 0.1, "only one ended within the window"
    assert run.admitted_share == pytest.approx(2 / 6)
    assert run.refusal_over_ttft == pytest.approx(0.35 / 0.75)
    assert misses([run]) == ["failed at 3x: 1 http 500: why"]


def test_load_may_not_cost_a_tenth_of_the_goodput() -> None:
    ones, threes = [a_run(1, 10.0), a_run(1, 11.0), a_run(1, 9.0)], [a_run(3, 9.1), a_run(3, 2.0), a_run(3, 9.5)]
    assert misses([*ones, *threes]) == []
    assert misses([*ones, *threes, a_run(3, 8.0), a_run(3, 8.0)]) == ["goodput at 3x is 80% of its peak"]
    assert misses([a_run(0.5, 5.0), a_run(1, 8.0), a_run(2, 10.0)]) == [], "who is asked for less does less"


def test_processes_may_neither_grow_nor_vanish() -> None:
    first, last = a_run(small=10, large=1000, lost=10), a_run(small=33, large=1160, new=500)
    assert misses([first, last]) == ["large grew from 1000 to 1160 MiB", "lost is gone"]


def test_a_process_holds_what_it_shares_with_nobody() -> None:
    held = memory.bytes_by_name(psutil.Process().parent())
    assert held[f"{psutil.Process().name()} ({os.getpid()})"] > 1 << 20
