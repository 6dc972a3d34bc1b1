"""Admit, plan, run, settle: as long as there is work; asleep otherwise.

Bookkeeping happens on the event loop, in microseconds; only `run` is on the engine thread. While a step runs, the loop
tells the tokens of the one before and serves rpcs; what they change is seen by the next plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from twostroke.engine.loop import EngineThread
from twostroke.errors import EngineLost
from twostroke.faults import reach
from twostroke.lifetime import Point
from twostroke.schedule.batch import StepResult
from twostroke.schedule.batching import Chunk, Step
from twostroke.schedule.cost import Budget, StepTerms
from twostroke.schedule.scheduler import Admission, Emission, Scheduler
from twostroke.schedule.sequence import Sequence as KnownSequence
from twostroke.worker.engine_check import EngineCheck
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.news import News
from twostroke.worker.rates import Rates

log = logging.getLogger(__name__)

MOST_GUILTY = 3
"""Sequences of one step that fail alone: where there are more, it is the engine that fails."""


class Role(Protocol):
    """What a role does when the scheduler has news for it."""

    def admitted(self, admission: Admission) -> None: ...

    def planning(self) -> None:
        """The next step is about to be chosen: the moment to change what is computed here."""

    def preempted(self, sequence: KnownSequence) -> None: ...

    def computed(self, step: Step, seconds: float) -> None:
        """A step has just been run, with more than one token of some sequence: of a prompt, that is."""

    def settled(self, emissions: list[Emission]) -> None: ...

    def failed(self, sequences: list[KnownSequence], error: Exception) -> None:
        """These have ended: their steps fail, and others' do not."""

    def lost(self, error: EngineLost) -> None:
        """The engine is gone, and with it everything that is open here."""


class WorkLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        engine: EngineThread,
        metrics: WorkerMetrics,
        progress: News,
        step_target_s: float,
        rates: Rates,
        check: EngineCheck,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._metrics = metrics
        self._progress = progress
        """Told after every step and every arrival: blocks may have become readable."""
        self._step_target_s = step_target_s
        self._wake = asyncio.Event()
        self.rates = rates
        self._check = check
        self.prefill_busy_s = 0.0
        """Of steps, what went to prompt tokens, since the beginning."""

    def wake(self) -> None:
        """Something changed that the next plan should see."""
        self._wake.set()

    @property
    def budget(self) -> Budget:
        """Of the next step in which streams run."""
        return self.rates.budget(self._step_target_s)

    @property
    def queued_s(self) -> float:
        """Predicted: until every prompt token that is to be computed here is computed."""
        return self.budget.drain_s(self._scheduler.queued(), self._scheduler.step_tokens)

    async def run(self, role: Role) -> None:
        """Until cancelled. Raises EngineLost where no further step can be trusted to the engine."""
        emissions: list[Emission] = []
        while True:
            self._wake.clear()
            step = self._plan(role)
            running = None if step is None else self._start(step)
            # While the engine is at the next step already, the last one's tokens go out.
            role.settled(emissions)
            self._progress.tell()
            if step is not None and running is not None:
                emissions = await self._settle(step, running, role)
            else:
                emissions = []
                await self._wake.wait()

    def _start(self, step: Step) -> asyncio.Future[StepResult]:
        reach(Point.WORKER_STEP)
        return self._engine.start(step.batch)

    def _plan(self, role: Role) -> Step | None:
        for admission in self._scheduler.admit():
            self._metrics.admitted(admission.sequence)
            role.admitted(admission)
        role.planning()
        step = self._scheduler.plan(self.budget)
        for sequence in self._scheduler.take_preempted():
            self._metrics.preemptions.inc()
            log.info("preempted request=%s known=%d", sequence.request_id, len(sequence.known))
            role.preempted(sequence)
            self.wake()  # its pages may admit others
        return step

    async def _settle(self, step: Step, running: asyncio.Future[StepResult], role: Role) -> list[Emission]:
        try:
            result = await running
        except Exception as error:
            return await self._recover(step, error, role)
        reach(Point.WORKER_COMPUTED)
        terms = StepTerms.of(step.batch)
        self.rates.observe(terms, result.seconds)
        prompt_share = self.rates.cost.prompt_share(terms)
        self.prefill_busy_s += result.seconds * prompt_share
        self._metrics.stepped(step, result.seconds, prompt_share)
        return self._take_in(step, result, role)

    def _take_in(self, step: Step, result: StepResult, role: Role) -> list[Emission]:
        if len(step.batch.tokens) > step.batch.sequences:
            role.computed(step, result.seconds)
        return self._scheduler.settle(step, result)

    async def _recover(self, step: Step, error: Exception, role: Role) -> list[Emission]:
        """Find out which of a failed step's sequences fail it, and go on with the others: nothing of them is lost,
        because computed advances after a step.

        Raises EngineLost where the engine is to blame.
        """
        log.error("step failed sequences=%d tokens=%d", step.batch.sequences, len(step.batch.tokens), exc_info=error)
        emissions: list[Emission] = []
        guilty = 0
        try:
            await self._check.examine(error)
            left = _halves(step.chunks)
            while left:
                part = self._scheduler.part(left.pop())
                try:
                    result = await self._engine.start(part.batch)
                except EngineLost:
                    raise
                except Exception as failure:
                    if len(part.chunks) > 1:
                        left += _halves(part.chunks)
                        continue
                    guilty += 1
                    if guilty > MOST_GUILTY:
                        raise EngineLost(f"more than {MOST_GUILTY} sequences of one step fail: {failure}") from failure
                    role.failed(self._scheduler.forsake(part), failure)
                else:
                    emissions += self._take_in(part, result, role)
        except EngineLost:
            self._metrics.step_failed("engine_lost")
            raise
        self._metrics.step_failed("request_failed" if guilty else "repeated")
        log.warning("step repeated sequences=%d failed=%d", step.batch.sequences, guilty)
        return emissions


def _halves(chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
    """In parts that are run one after the other; the first one last."""
    middle = len(chunks) // 2
    return [chunks[middle:], chunks[:middle]] if middle else [chunks]
