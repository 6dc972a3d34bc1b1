"""Load and random faults until the time is over, and what they did to streams, pools and memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time

import psutil

from tests import process_table
from tests.trials.chaos.faults.answer import Transcript
from tests.trials.chaos.faults.outcome import Outcome
from tests.trials.chaos.faults.report import Facts
from tests.trials.chaos.faults.run import FaultRun
from tests.trials.chaos.faults.session import broken_cluster, keep_logs
from tests.trials.chaos.faults.testbed import Bed
from tests.trials.chaos.faults.trials import SECONDS, Trial, trials
from tests.trials.chaos.soak.memory import Memory
from tests.trials.chaos.soak.options import SoakOptions
from tests.trials.chaos.soak.report import Course, as_json, summary, written

SAMPLE_S = 10.0
TELL_S = 60.0


def run_session(options: SoakOptions) -> int:
    """Exit status: 1 on any miss."""
    session = _Session(options)
    try:
        asyncio.run(session.run())
    finally:
        facts = Facts.now(options.cluster, session.elapsed_s)
        options.report.tell(summary(session.course, facts), as_json(session.course, facts))
    options.report.publish(written(session.course, facts))
    return 1 if session.course.misses() else 0


class _Session:
    def __init__(self, options: SoakOptions) -> None:
        self._options = options
        self._draws = random.Random(f"soak {options.cluster.seed}")
        self._trials = trials(options.transports, options.cluster.seed, ())
        self._began_s = time.monotonic()
        self._expected: dict[str, Transcript] = {}
        self.course = Course()
        """Grows: whoever interrupts gets what there is."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def _is_over(self) -> bool:
        return self.elapsed_s >= self._options.duration_s

    async def run(self) -> None:
        while not self._is_over:
            await self._one_cluster()

    async def _one_cluster(self) -> None:
        """Breaks a cluster until the time is over, or the cluster is past help."""
        options = self._options.cluster
        self.course.clusters += 1
        async with broken_cluster(options, self._options.transports, SECONDS) as (bed, logs, run):
            watching = asyncio.create_task(self._watch(bed))
            try:
                self._expected = await run.prepare(self._expected)
                while not self._is_over:
                    outcome = await self._one_fault(run)
                    if outcome.is_lossy:
                        keep_logs(logs, options.logs, outcome)
                    if outcome.left or outcome.missing:
                        return
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _one_fault(self, run: FaultRun) -> Outcome:
        """After a pause in which nothing is broken."""
        streams, wrong = await run.undisturbed(self._draws.expovariate(1 / self._options.quiet_s))
        self.course.quiet_streams += streams
        self.course.wrong += wrong
        trial: Trial = self._draws.choice(self._trials)
        model = self._options.cluster.model
        outcome = await run.one(trial, transports=self._options.transports, model=model)
        self.course.outcomes.append(outcome)
        if outcome.is_lossy:
            print(f"soak: MISS {trial}: {outcome.verdict}", file=sys.stderr, flush=True)
        return outcome

    async def _watch(self, bed: Bed) -> None:
        """Samples the processes, and says now and then how things are."""
        memory = Memory()
        self.course.memories.append(memory)
        stopped_s = self.elapsed_s
        while True:
            with contextlib.suppress(psutil.Error):  # processes end while they are looked at
                memory.take(time.monotonic(), await asyncio.to_thread(_sizes, bed))
            if self.elapsed_s - stopped_s >= TELL_S:
                stopped_s = self.elapsed_s
                print(f"soak: {stopped_s / 60:.0f} min: {self.course.line()}", file=sys.stderr, flush=True)
            await asyncio.sleep(SAMPLE_S)


def _sizes(bed: Bed) -> list[tuple[int, str, int, int]]:
    sizes = []
    for process in bed.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            title = process_table.title_of(process)
            sizes.append((process.pid, title, int(process.memory_info().rss), int(process.num_fds())))
    return sizes
