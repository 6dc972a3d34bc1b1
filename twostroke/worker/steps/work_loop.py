"""The work loop admits, plans, runs and updates while there is work, and sleeps otherwise.

Bookkeeping happens on the event loop, in microseconds; only `run` is on the engine thread. While a step runs, the loop
sends the previous step's tokens, serves rpcs and admits what they bring; the next plan sees what they changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import itemgetter

from twostroke.base.errors import EngineLost
from twostroke.base.fault_points import Point, reach
from twostroke.engine.loop import EngineThread
from twostroke.observability.profiler import WORK_LOOP, Profiler
from twostroke.scheduler.batch import StepResult
from twostroke.scheduler.batching import Chunk, Step
from twostroke.scheduler.cost import Budget, Queued, StepTerms, StreamStep
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.values import Emission
from twostroke.worker.branches import BetweenSteps, Prefetching
from twostroke.worker.condition import Condition
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.role_host import RoleHandlers
from twostroke.worker.steps.engine_check import EngineCheck
from twostroke.worker.steps.sharing import TimeSharing

log = logging.getLogger(__name__)

MOST_FAILED_SEQUENCES = 3
"""Sequences of one step that fail by themselves. If more fail and none succeeds, the engine is at fault."""
MOST_FAILED_PARTS = 32
"""Failed parts of one step, with no success before them, after which the engine is given up."""


MEMORY = 1024.0
"""Stream steps that the averages cover, those of some answers, so that no single answer decides; older steps fade."""
MOST_TOKENS = 33
"""Most tokens of one stream that a step counts. Some answers get thousands at once: one of them would decide the
predictions for a thousand steps of others."""


class StreamSteps:
    """Averages of what steps do for each of their streams."""

    def __init__(self) -> None:
        self._steps = 0.0
        self._streams = 0.0
        """Streams of all steps."""
        self._rows = 0.0
        self._tokens = 0.0
        self._between_s = 0.0
        """Seconds of other work before those steps."""
        self._since_s = 0.0
        """Seconds of such work since the last step."""
        self._had_streams = False
        """Whether the last step had streams: what is computed before the next one delays them."""

    @property
    def each(self) -> StreamStep:
        """What a step does for each of its streams, on average."""
        if not self._streams:
            return StreamStep()
        return StreamStep(self._rows / self._streams, self._tokens / self._streams, self._between_s / self._steps)

    def worked_between(self, seconds: float) -> None:
        """Notes that other work came before the next step."""
        if self._had_streams:
            self._since_s += seconds

    def observe(self, step: Step, emissions: Sequence[Emission]) -> None:
        """Counts a step and the tokens that it has made known. The first token of an answer is not a stream's yet."""
        chunks = [chunk for chunk in step.chunks if chunk.samples and chunk.start >= chunk.sequence.prompt_tokens]
        self._had_streams = bool(chunks)
        if not chunks:
            return
        kept = (1.0 - 1.0 / MEMORY) ** len(chunks)
        self._steps = kept * self._steps + 1.0
        self._streams = kept * self._streams + len(chunks)
        self._rows = kept * self._rows + sum([1 + len(chunk.proposed) for chunk in chunks])
        self._tokens *= kept
        self._between_s = kept * self._between_s + self._since_s
        self._since_s = 0.0
        if len(chunks) < len(step.chunks):
            streams = {chunk.sequence for chunk in chunks}
            emissions = [emission for emission in emissions if emission.sequence in streams]
        self.became_known(emissions)

    def became_known(self, emissions: Sequence[Emission]) -> None:
        """Counts tokens of streams that have become known, some of them later than their step ended."""
        counts = Counter(map(itemgetter(0), emissions))
        if len(counts) == len(emissions):
            self._tokens += len(emissions)
        else:
            self._tokens += sum(min(count, MOST_TOKENS) for count in counts.values())


class WorkLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        engine: EngineThread,
        metrics: WorkerMetrics,
        progress: Condition,
        sharing: TimeSharing,
        check: EngineCheck,
        profiler: Profiler,
        between: BetweenSteps | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._between = between
        self._engine = engine
        self._metrics = metrics
        self._progress = progress
        """Notified after every step and every arrival: blocks may have become readable."""
        self._sharing = sharing
        self._wake = asyncio.Event()
        self.rates = sharing.rates
        self._check = check
        self._profiler = profiler
        self._began_s = 0.0
        """When the latest step began."""
        self._admit_beside: Callable[[], None] | None = None
        """Admits new sequences beside the step that runs; None where none runs."""
        self._admission_error: Exception | None = None
        """The failure of an admission beside a step. It ends the loop, as any other failed admission does."""
        self.prefill_busy_s = 0.0
        """Step time spent on prompt tokens since the epoch began."""
        self.stream_steps = StreamSteps()

    def wake(self) -> None:
        """Wakes the loop after a change that the next plan should see.

        Where `Prefetching.admits_beside_steps` allows it, new sequences are admitted while a step runs. What they pull
        is on its way before the step ends, and what they find here is announced.
        """
        self._wake.set()
        if self._admit_beside is not None and self._scheduler.has_new:
            asyncio.get_running_loop().call_soon(self._admit_new)

    @property
    def budget(self) -> Budget:
        """Time budget of the next step in which streams run."""
        return self._sharing.budget

    @property
    def lends(self) -> bool:
        """Whether other workers use this worker's cores for prompts that wait there."""
        return self._sharing.prompts_beside.count > 0

    @property
    def queued_s(self) -> float:
        """Predicted time until every queued prompt token is computed."""
        return self.drain_s(self._scheduler.load.queued())

    def drain_s(self, queued: Queued) -> float:
        return self.budget.drain_s(queued, self._scheduler.step_tokens)

    async def run(self, role: RoleHandlers, prefetch: Prefetching) -> None:
        """Runs steps until cancelled. Raises EngineLost if the engine cannot be trusted with another step."""
        emissions: list[Emission] = []
        while True:
            self._wake.clear()
            work = None if self._between is None else self._between.begin()
            if work is not None:
                self._send(emissions, role)
                emissions = []
                begun_s = asyncio.get_running_loop().time()
                await work
                self.stream_steps.worked_between(asyncio.get_running_loop().time() - begun_s)
            with self._profiler.slice(WORK_LOOP, "admit"):
                self._admit(role, prefetch)
                role.planning()
                late = self._scheduler.take_late()
                if late:
                    self.stream_steps.became_known(late)
                    emissions += late
            pause_s = self._sharing.pause_s(asyncio.get_running_loop().time() - self._began_s)
            if pause_s > 0:
                self._send(emissions, role)
                emissions = []
                self._sharing.lend()
                with self._profiler.slice(WORK_LOOP, "pause"):
                    await self._rest(pause_s)
                continue
            with self._profiler.slice(WORK_LOOP, "plan"):
                step = self._plan(role)
            running = None if step is None else self._start(step)
            # The previous step's tokens are sent while the engine runs the next step.
            self._send(emissions, role)
            emissions = []
            if step is not None and running is not None:
                self._let_admit(role, prefetch)
                emissions = await self._update(step, running, role)
            elif work is None:
                await self._wake.wait()

    def _start(self, step: Step) -> asyncio.Future[StepResult]:
        reach(Point.WORKER_STEP)
        self._began_s = asyncio.get_running_loop().time()
        return self._engine.start(step.batch)

    def _send(self, emissions: list[Emission], role: RoleHandlers) -> None:
        with self._profiler.slice(WORK_LOOP, "send"):
            role.emitted(emissions)
            self._progress.notify()

    async def _rest(self, seconds: float) -> None:
        """Waits for that long, or until something changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _admit(self, role: RoleHandlers, prefetch: Prefetching) -> None:
        if self._admission_error is not None:
            raise self._admission_error
        prefetch.begin_admission(self._scheduler.next_waiting())
        for admission in self._scheduler.admit():
            self._metrics.admitted(admission.sequence)
            role.admitted(admission)
        prefetch.end_admission(self._scheduler.running)

    def _let_admit(self, role: RoleHandlers, prefetch: Prefetching) -> None:
        """Lets new sequences be admitted beside the step that has begun."""
        if prefetch.admits_beside_steps:
            self._admit_beside = functools.partial(self._admit, role, prefetch)

    def _admit_new(self) -> None:
        if self._admit_beside is None or self._admission_error is not None or not self._scheduler.has_new:
            return
        try:
            self._admit_beside()
        except Exception as error:
            self._admission_error = error
        self._progress.notify()

    def _plan(self, role: RoleHandlers) -> Step | None:
        budget = self.budget
        step = self._scheduler.plan(budget)
        queued = self._scheduler.load.queued()
        self._metrics.planned(queued.all_tokens, budget.drain_s(queued, self._scheduler.step_tokens))
        self._sharing.report_waiting(step)
        for sequence in self._scheduler.take_preempted():
            self._metrics.preemptions.inc()
            log.info("preempted request=%s known=%d", sequence.request_id, len(sequence.known))
            role.preempted(sequence)
            self.wake()  # its pages may admit others
        return step

    async def _update(self, step: Step, running: asyncio.Future[StepResult], role: RoleHandlers) -> list[Emission]:
        try:
            try:
                result = await running
            finally:
                self._admit_beside = None
        except Exception as error:
            await self._recover(step, error, role)
            return []
        reach(Point.WORKER_COMPUTED)
        with self._profiler.slice(WORK_LOOP, "update"):
            terms = StepTerms.of(step.batch)
            self.rates.observe(terms, result.seconds)
            prompt_fraction = self.rates.cost.prompt_fraction(terms)
            self.prefill_busy_s += result.seconds * prompt_fraction
            self._metrics.stepped(step, result.seconds, prompt_fraction)
            return self._take_in(step, result, role)

    def _take_in(self, step: Step, result: StepResult, role: RoleHandlers) -> list[Emission]:
        self._check.computed(len(step.batch.tokens))
        if step.batch.has_prompts:
            role.computed(step, result.seconds)
        emissions = self._scheduler.update(step, result)
        self.stream_steps.observe(step, emissions)
        return emissions

    async def _recover(self, step: Step, error: Exception, role: RoleHandlers) -> None:
        """Finds the sequences that make a step fail, and continues with the others, which lose nothing.

        Raises EngineLost if the engine is at fault.
        """
        # Where an engine is lost by no fault of this process, the line at the end of its epoch is enough.
        if not isinstance(error, EngineLost) or error.__cause__ is not None:
            log.error(
                "step failed sequences=%d tokens=%d", step.batch.sequences, len(step.batch.tokens), exc_info=error
            )
        try:
            await self._check.examine(error)
            failed = await self._run_parts(step, role)
        except EngineLost:
            self._metrics.step_failed("engine_lost")
            raise
        for part, failure in failed:
            role.failed(self._scheduler.abort_step(part), failure)
        self._metrics.step_failed("request_failed" if failed else "repeated")
        log.warning("step repeated sequences=%d failed=%d", step.batch.sequences, len(failed))

    async def _run_parts(self, step: Step, role: RoleHandlers) -> list[tuple[Step, Exception]]:
        """Runs halves, quarters and so on of a failed step; returns the sequences that fail by themselves, each with
        its error.

        Large parts come first, so that a few failing sequences do not look like a failing engine. Each part's tokens
        are sent before the next part runs, because its sequences may be closed meanwhile.
        """
        failed: list[tuple[Step, Exception]] = []
        left = deque(_halves(step.chunks))
        failed_parts = succeeded_parts = 0
        while left:
            part = self._scheduler.step_of(left.popleft())
            try:
                result = await self._engine.start(part.batch)
            except EngineLost:
                raise
            except Exception as failure:
                failed_parts += 1
                if len(part.chunks) > 1:
                    left += _halves(part.chunks)
                else:
                    failed.append((part, failure))
                if not succeeded_parts and (
                    failed_parts > MOST_FAILED_PARTS or (not left and len(failed) > MOST_FAILED_SEQUENCES)
                ):
                    raise EngineLost(f"a step failed in each of {failed_parts} parts: {failure}") from failure
            else:
                succeeded_parts += 1
                role.emitted(self._take_in(part, result, role))
        if failed:
            self._check.blame(max(len(part.batch.tokens) for part, _ in failed))
        return failed


def _halves(chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
    middle = len(chunks) // 2
    return [chunks[:middle], chunks[middle:]] if middle else [chunks]
