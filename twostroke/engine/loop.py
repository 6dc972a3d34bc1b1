"""The one thread that touches the device, as seen from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from twostroke.observability.profiler import ENGINE, Profiler
from twostroke.scheduler.batch import Batch, Runner, StepResult
from twostroke.scheduler.cost import StepTerms

Result = TypeVar("Result")

THREAD_NAME = "engine"
"""Name of the thread, in this process and in the system's list of threads."""


class EngineThread:
    """Runs steps one after the other on a thread of its own; a step's exception is raised where it was awaited."""

    def __init__(self, runner: Runner, profiler: Profiler | None = None) -> None:
        self._runner = runner
        self.profiler = profiler or Profiler()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME, initializer=_show_name)
        self.is_lost = False
        """Whether the thread was given up: its step in flight may never end. The process is about to end."""

    def start(self, batch: Batch) -> asyncio.Future[StepResult]:
        """Starts a step. The step is under way when this returns."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[StepResult] = loop.create_future()
        self._thread.submit(self._run_for, loop, started, batch)
        return started

    async def between_steps(self, call: Callable[[], Result]) -> Result:
        """Runs `call` on the thread, after the step in flight."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def give_up(self) -> None:
        self.is_lost = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def wait_idle(self) -> None:
        """Waits for the step in flight, even if its result is not awaited any more."""
        if self.is_lost:
            return
        await self.between_steps(int)

    def close(self) -> None:
        """Waits for the step in flight, then closes the runner on the thread that used it."""
        assert not self.is_lost, "it may never answer"
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def _run_for(self, loop: asyncio.AbstractEventLoop, started: asyncio.Future[StepResult], batch: Batch) -> None:
        """Runs a step, and hands its result to the event loop in one call, because this happens at every step."""
        result: StepResult | None = None
        error: BaseException | None = None
        try:
            result = self._run(batch)
        except BaseException as failure:  # raised where the step is awaited
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(_end_step, started, result, error)

    def _run(self, batch: Batch) -> StepResult:
        if not self.profiler.is_on:
            return self._runner.run(batch)
        with self.profiler.slice(ENGINE, "step", _facts(batch)):
            return self._runner.run(batch)


def _end_step(started: asyncio.Future[StepResult], result: StepResult | None, error: BaseException | None) -> None:
    if started.done():  # the task that awaited it was cancelled
        return
    if error is not None:
        started.set_exception(error)
    elif result is not None:
        started.set_result(result)


def _facts(batch: Batch) -> dict[str, float]:
    terms = StepTerms.of(batch)
    return {
        "rows": len(batch.tokens),
        "sequences": batch.sequences,
        "streams": terms.streams,
        "context_tokens": terms.context_tokens,
        "prompt_tokens": terms.prompt_tokens,
        "prompt_pairs": terms.prompt_pairs,
    }


def _show_name() -> None:
    """Names the thread for `top -H` and profilers, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME)
