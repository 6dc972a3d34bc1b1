"""Load and random faults until the time is over, and what they did to streams, pools and memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests import process_table
from tests.chaos import page_section
from tests.chaos.faults.answer import Transcript
from tests.chaos.faults.client import Clients
from tests.chaos.faults.outcome import Outcome
from tests.chaos.faults.report import Facts
from tests.chaos.faults.run import FaultRun
from tests.chaos.faults.session import kept_logs, load_of
from tests.chaos.faults.testbed import Bed, testbed
from tests.chaos.faults.trials import SECONDS, Trial, trials
from tests.chaos.soak.memory import Memory
from tests.chaos.soak.options import SoakOptions
from tests.chaos.soak.report import Course, as_json, summary, written
from tools.output import write_json

SAMPLE_S = 10.0
TELL_S = 60.0


def run_session(options: SoakOptions) -> int:
    """Exit status: 1 on any miss."""
    session = _Session(options)
    try:
        asyncio.run(session.run())
    finally:
        facts = Facts.now(options.cluster, session.elapsed_s)
        write_json(as_json(session.course, facts), options.json_path)
        print(summary(session.course, facts), file=sys.stderr, flush=True)
    if options.write is not None:
        page_section.put(options.write, page_section.SOAK, written(session.course, facts))
    return 1 if session.course.misses() else 0


class _Session:
    def __init__(self, options: SoakOptions) -> None:
        self._options = options
        self._draws = random.Random(f"soak {options.cluster.seed}")
        self._trials = trials(options.cluster.transports[0], options.cluster.seed, ())
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
        """Break a cluster until the time is over, or the cluster is past help."""
        options = self._options.cluster
        self.course.clusters += 1
        with tempfile.TemporaryDirectory(prefix="tsf-") as folder:
            async with testbed(Path(folder), options.flags(options.transports[0]), {}) as (bed, logs):
                clients = Clients(routers=bed.routers, model=bed.model, patience_s=options.patience_s)
                run = FaultRun(bed, clients, load_of(options), SECONDS)
                watching = asyncio.create_task(self._watch(bed))
                try:
                    self._expected = await run.prepare(self._expected)
                    while not self._is_over:
                        outcome = await self._one_fault(run)
                        if outcome.is_lossy:
                            kept_logs(logs, options.logs, outcome)
                        if outcome.left or outcome.missing:
                            return
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                    await run.close()

    async def _one_fault(self, run: FaultRun) -> Outcome:
        """After a pause in which nothing is broken."""
        streams, wrong = await run.undisturbed(self._draws.expovariate(1 / self._options.quiet_s))
        self.course.quiet_streams += streams
        self.course.wrong += wrong
        options = self._options.cluster
        trial: Trial = self._draws.choice(self._trials)
        outcome = await run.one(trial, transports=options.transports[0], model=options.model)
        self.course.outcomes.append(outcome)
        if outcome.is_lossy:
            print(f"soak: MISS {trial}: {outcome.verdict}", file=sys.stderr, flush=True)
        return outcome

    async def _watch(self, bed: Bed) -> None:
        """Sample the processes, and say now and then how things are."""
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
