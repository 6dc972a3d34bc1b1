"""Admit, plan, run, settle: as long as there is work; asleep otherwise.

Bookkeeping happens on the event loop, in microseconds; only `run` is on the engine thread. While a step runs, the loop
serves rpcs; what they change is seen by the next plan.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from twostroke.engine.loop import EngineThread
from twostroke.schedule.batch import Batch
from twostroke.schedule.batching import Step
from twostroke.schedule.scheduler import Admission, Emission, Scheduler
from twostroke.schedule.sequence import Sequence
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.news import News

log = logging.getLogger(__name__)

SMOOTHING = 0.2
"""Weight of the newest step in the reported rates: about the last ten steps count."""


class Role(Protocol):
    """What a role does when the scheduler has news for it."""

    def admitted(self, admission: Admission) -> None: ...

    def preempted(self, sequence: Sequence) -> None: ...

    def settled(self, emissions: list[Emission]) -> None: ...

    def failed(self, sequences: list[Sequence], error: Exception) -> None: ...


class Rates:
    """Cost of recent steps, for routers that predict; 0 while unknown."""

    def __init__(self) -> None:
        self.seconds_per_step = 0.0
        """Of a step in which every sequence runs one token and samples the next."""
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Of prefill. Long chunks count more than the short tails of prompts, whose time is mostly the step's own."""
        return max(0.0, self._prefill_s / self._prefill_tokens) if self._prefill_tokens else 0.0

    def observe(self, batch: Batch, seconds: float) -> None:
        prefill_tokens = len(batch.tokens) - len(batch.samples)
        if not prefill_tokens:
            self.seconds_per_step = _smooth(self.seconds_per_step, seconds)
        elif self.seconds_per_step or not batch.samples:
            sampling_s = self.seconds_per_step if batch.samples else 0.0
            self._prefill_s = (1 - SMOOTHING) * self._prefill_s + seconds - sampling_s
            self._prefill_tokens = (1 - SMOOTHING) * self._prefill_tokens + prefill_tokens


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)


class WorkLoop:
    def __init__(self, scheduler: Scheduler, engine: EngineThread, metrics: WorkerMetrics, progress: News) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._metrics = metrics
        self._progress = progress
        """Told after every step and every arrival: blocks may have become readable."""
        self._wake = asyncio.Event()
        self.rates = Rates()

    def wake(self) -> None:
        """Something changed that the next plan should see."""
        self._wake.set()

    async def run(self, role: Role) -> None:
        while True:
            self._wake.clear()
            step = self._plan(role)
            if step is not None:
                await self._run(step, role)
            else:
                await self._wake.wait()

    def _plan(self, role: Role) -> Step | None:
        for admission in self._scheduler.admit():
            self._metrics.admitted(admission.sequence)
            role.admitted(admission)
        step = self._scheduler.plan()
        for sequence in self._scheduler.take_preempted():
            self._metrics.preemptions.inc()
            log.info("preempted request=%s known=%d", sequence.request_id, len(sequence.known))
            role.preempted(sequence)
            self.wake()  # its pages may admit others
        self._progress.tell()
        return step

    async def _run(self, step: Step, role: Role) -> None:
        try:
            result = await self._engine.run(step.batch)
        except Exception as error:
            log.exception("step failed sequences=%d tokens=%d", step.batch.sequences, len(step.batch.tokens))
            role.failed(self._scheduler.forsake(), error)
            self._progress.tell()
            return
        self.rates.observe(step.batch, result.seconds)
        self._metrics.stepped(step, result.seconds)
        role.settled(self._scheduler.settle(step, result))
        self._progress.tell()
