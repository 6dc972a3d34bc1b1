"""Admit, plan, run, settle: as long as there is work; asleep otherwise.

Bookkeeping happens on the event loop, in microseconds; only `run` is on the engine thread. While a step runs, the loop
tells the tokens of the one before and serves rpcs; what they change is seen by the next plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from twostroke.engine.loop import EngineThread
from twostroke.errors import EngineLost
from twostroke.fault_points import Point, reach
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
"""Sequences of one step that fail alone: where there are more, and none succeeds, it is the engine that fails."""
MOST_FAILED_PARTS = 32
"""Parts of one step that fail before the first one succeeds; the others are not tried any more."""


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
            await self._recover(step, error, role)
            return []
        reach(Point.WORKER_COMPUTED)
        terms = StepTerms.of(step.batch)
        self.rates.observe(terms, result.seconds)
        prompt_share = self.rates.cost.prompt_share(terms)
        self.prefill_busy_s += result.seconds * prompt_share
        self._metrics.stepped(step, result.seconds, prompt_share)
        return self._take_in(step, result, role)

    def _take_in(self, step: Step, result: StepResult, role: Role) -> list[Emission]:
        self._check.computed(len(step.batch.tokens))
        if len(step.batch.tokens) > step.batch.sequences:
            role.computed(step, result.seconds)
        return self._scheduler.settle(step, result)

    async def _recover(self, step: Step, error: Exception, role: Role) -> None:
        """Find out which of a failed step's sequences fail it, and go on with the others: nothing of them is lost,
        because computed advances after a step.

        Raises EngineLost where the engine is to blame.
        """
        log.error("step failed sequences=%d tokens=%d", step.batch.sequences, len(step.batch.tokens), exc_info=error)
        try:
            await self._check.examine(error)
            guilty = await self._run_parts(step, role)
        except EngineLost:
            self._metrics.step_failed("engine_lost")
            raise
        for part, failure in guilty:
            role.failed(self._scheduler.forsake(part), failure)
        self._metrics.step_failed("request_failed" if guilty else "repeated")
        log.warning("step repeated sequences=%d failed=%d", step.batch.sequences, len(guilty))

    async def _run_parts(self, step: Step, role: Role) -> list[tuple[Step, Exception]]:
        """Run halves, quarters and so on, of what fails; the sequences that fail alone, each with its error.

        Large parts come first, so that a few sequences that fail together do not look like an engine that does. What a
        part computed is told before the next one runs: its sequences may be closed meanwhile.
        """
        guilty: list[tuple[Step, Exception]] = []
        left = deque(_halves(step.chunks))
        failed_parts = succeeded_parts = 0
        while left:
            part = self._scheduler.part(left.popleft())
            try:
                result = await self._engine.start(part.batch)
            except EngineLost:
                raise
            except Exception as failure:
                failed_parts += 1
                if len(part.chunks) > 1:
                    left += _halves(part.chunks)
                else:
                    guilty.append((part, failure))
                if not succeeded_parts and (
                    failed_parts > MOST_FAILED_PARTS or (not left and len(guilty) > MOST_GUILTY)
                ):
                    raise EngineLost(f"a step failed in each of {failed_parts} parts: {failure}") from failure
            else:
                succeeded_parts += 1
                role.settled(self._take_in(part, result, role))
        if guilty:
            self._check.blame(max(len(part.batch.tokens) for part, _ in guilty))
        return guilty


def _halves(chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
    middle = len(chunks) // 2
    return [chunks[:middle], chunks[middle:]] if middle else [chunks]
