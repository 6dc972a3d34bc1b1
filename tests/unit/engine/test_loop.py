"""The engine thread: one, always the same, and its failures reach whoever waits."""

from __future__ import annotations

import threading

import pytest

from tests.unit.engine.batches import Stream, step
from twostroke.engine.loop import EngineThread
from twostroke.scheduler.batch import Batch, StepResult


class Recorder:
    """A runner that notes on which thread it is called, and fails on request."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.fails = False

    def run(self, batch: Batch) -> StepResult:
        self.threads.append(threading.current_thread().name)
        if self.fails:
            raise ValueError("no such page")
        return StepResult((), 0.0)

    def close(self) -> None:
        self.threads.append(threading.current_thread().name)


async def test_every_step_and_the_end_run_on_one_thread_of_its_own() -> None:
    recorder = Recorder()
    engine = EngineThread(recorder)
    batch = step([(Stream([1, 2], [0]), 1)])
    for _ in range(3):
        await engine.start(batch)
    engine.close()
    assert len(recorder.threads) == 4
    assert set(recorder.threads) == {"engine_0"}


async def test_a_failed_step_is_raised_where_it_was_awaited_and_the_thread_goes_on() -> None:
    recorder = Recorder()
    engine = EngineThread(recorder)
    batch = step([(Stream([1, 2], [0]), 1)])
    recorder.fails = True
    with pytest.raises(ValueError, match="no such page"):
        await engine.start(batch)
    recorder.fails = False
    assert (await engine.start(batch)).tokens == ()
    engine.close()
