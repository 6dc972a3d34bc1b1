"""Engine steps of one epoch of a worker: the scheduler that chooses them, the loop that runs them, their costs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.config import Role, WorkerConfig
from twostroke.kv_cache.memory import PageMemory
from twostroke.observability.profiler import WORK_LOOP, Profiler
from twostroke.scheduler.batching import BatchBuilder, Chunk, Step, StepBuilder
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.step_target import USUAL_S, StepTarget
from twostroke.scheduler.values import SchedulerLimits
from twostroke.worker.branches import Branches
from twostroke.worker.condition import Condition
from twostroke.worker.engine_state import EngineState
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.steps import calibration
from twostroke.worker.steps.calibration import CalibrationLimits, calibrate, step_tokens_within
from twostroke.worker.steps.engine_check import EngineCheck, probe_batch
from twostroke.worker.steps.sharing import TimeSharing
from twostroke.worker.steps.work_loop import WorkLoop

log = logging.getLogger(__name__)


class EngineSteps:
    """The steps of one epoch. Its engine may be older than the epoch. Call `prepare` before the first step."""

    def __init__(
        self,
        config: WorkerConfig,
        engine_state: EngineState,
        metrics: WorkerMetrics,
        branches: Branches,
    ) -> None:
        self._config = config
        self._engine_state = engine_state
        self._second_models = branches.second_models
        self.scheduler = _scheduler_of(config, engine_state, branches)
        self.progress = Condition()
        """Notified after each step."""
        self.check = _check_of(config, engine_state)
        self.loop = WorkLoop(
            self.scheduler,
            engine_state.engine,
            metrics,
            self.progress,
            _sharing_of(config, engine_state, self.scheduler),
            self.check,
            engine_state.engine.profiler,
            branches.between_steps(self.scheduler, _limits_of(config, engine_state)),
        )

    async def prepare(self) -> None:
        """Measures what a step costs, sets how many tokens it may have, and keeps the tokens of the engine's probe."""
        await self._calibrate()
        is_given = self._config.schedule.max_num_batched_tokens is not None
        if not is_given and _computes_on_cores(self._config, self._engine_state):  # their speed differs by machine
            self.scheduler.step_tokens = step_tokens_within(self.loop.rates.cost, self.scheduler.step_tokens)
        await self.check.learn()

    async def _calibrate(self) -> None:
        """Measures step costs before serving, unless an earlier epoch of this process has."""
        config, state = self._config, self._engine_state
        if state.is_calibrated:
            return
        step_limits = CalibrationLimits(
            step_tokens=self.scheduler.step_tokens,
            max_model_len=state.facts.max_model_len,
            max_sequences=config.schedule.max_num_seqs,
            pages=state.pool.total,
            block_size=state.facts.block_size,
            runs_decode=config.can_sample,
            placed=state.placed,
        )
        budget = calibration.PACED_BUDGET if config.model.is_paced else calibration.COMPUTED_BUDGET
        started_s = time.monotonic()
        with contextlib.ExitStack() as turn:
            if state.neighbours is not None:
                await asyncio.to_thread(turn.enter_context, state.neighbours.measuring())
            await calibrate(state.engine, self.loop.rates, step_limits, budget)
            for model in self._second_models:
                of_model = dataclasses.replace(
                    step_limits, max_model_len=model.max_model_len, pages=model.pages, placed=None
                )
                await calibrate(model.steps, model.rates, of_model, budget)
                log.info("%s calibrated %s", model.name, model.rates.cost)
        state.is_calibrated = True
        log.info("calibrated seconds=%.3f %s", time.monotonic() - started_s, self.loop.rates.cost)


@dataclass(frozen=True, slots=True)
class ProfiledBuilder:
    """Shows a profile the part of planning that builds the batch."""

    builder: StepBuilder
    profiler: Profiler

    def build(self, chunks: Sequence[Chunk]) -> Step:
        with self.profiler.slice(WORK_LOOP, "build batch"):
            return self.builder.build(chunks)


def _check_of(config: WorkerConfig, engine_state: EngineState) -> EngineCheck:
    facts, total = engine_state.facts, engine_state.pool.total
    probe = probe_batch(facts.block_size, total, facts.max_model_len, samples=config.can_sample)
    return EngineCheck(engine_state.engine, engine_state.placed(probe), time.monotonic)


def _scheduler_of(
    config: WorkerConfig,
    engine_state: EngineState,
    branches: Branches,
) -> Scheduler:
    limits = _limits_of(config, engine_state)
    builder = BatchBuilder(limits.block_size, engine_state.pool.total, limits.eos_token_ids, engine_state.places)
    profiled = ProfiledBuilder(builder, engine_state.engine.profiler)
    pool, schedule = engine_state.pool, config.schedule
    return Scheduler(pool, schedule, limits, profiled, branches.gate, branches.for_scheduler(limits))


def _limits_of(config: WorkerConfig, engine_state: EngineState) -> SchedulerLimits:
    facts = engine_state.facts
    return SchedulerLimits(
        facts.block_size,
        facts.max_model_len,
        facts.eos_token_ids,
        align_chunks=config.role is Role.PREFILL,
        on_gpu=_is_on_gpu(engine_state),
    )


def _is_on_gpu(engine_state: EngineState) -> bool:
    return not isinstance(engine_state.memory, PageMemory)


def _computes_on_cores(config: WorkerConfig, engine_state: EngineState) -> bool:
    return not _is_on_gpu(engine_state) and not config.model.is_paced


def _sharing_of(config: WorkerConfig, engine_state: EngineState, scheduler: Scheduler) -> TimeSharing:
    """Makes the sharing of time. On cores the step target follows the measured costs, on a device it is usual."""
    usual_s = None if _computes_on_cores(config, engine_state) else USUAL_S
    target = StepTarget(config.schedule.step_target_s, config.slo_itl_s, usual_s)
    return TimeSharing(
        scheduler,
        engine_state.rates,
        target,
        lambda: asyncio.get_running_loop().time(),
        engine_state.neighbours,
        promises=config.slo_ttft_s is not None,
    )
