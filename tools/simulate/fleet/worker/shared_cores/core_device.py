"""A worker's engine on the cores of a simulated host: its steps take what they cost there, and it learns of that."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager

from tools.simulate.fleet.shape import SharedCores
from tools.simulate.fleet.worker.shared_cores.cores import HostCores, RunningStep
from tools.simulate.fleet.worker.steps import SAMPLED, PacedWorker
from twostroke.config import Role
from twostroke.engine.cores.borrowing import Borrowing, StepKind
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.cost import StepTerms
from twostroke.scheduler.lateness import WaitingPrompts
from twostroke.worker.measured.rates import Rates
from twostroke.worker.steps.calibration import CalibrationLimits, sweep


class CoreDevice:
    """Stands for an engine thread, and for what a worker's runner says to its neighbours."""

    def __init__(self, host: PacedWorker, shared: SharedCores, cores: HostCores) -> None:
        self._host = host
        self._shared = shared
        self._cores = cores
        self._core = cores.join()
        self._borrowing = Borrowing()

    def start(self, batch: Batch) -> asyncio.Future[StepResult]:
        done: asyncio.Future[StepResult] = self._host.virtual_loop.create_future()
        self._host.virtual_loop.call_later(self._shared.between_s, self._begin, batch, done)
        return done

    def stop(self) -> None:
        self._cores.leave(self._core)

    def tell_prompts(self, prompts: WaitingPrompts) -> None:
        borrows = self._shared.borrows and self._borrowing.prompts.wanted
        self._core.prompts = prompts if borrows else WaitingPrompts()

    def prompts_beside(self) -> WaitingPrompts:
        return self._cores.prompts_beside(self._core)

    def measuring(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def lend(self) -> None:
        self._cores.lend(self._core)

    def _begin(self, batch: Batch, done: asyncio.Future[StepResult]) -> None:
        if done.cancelled():
            return
        host, terms, begun_s = self._host, StepTerms.of(batch), self._host.virtual_loop.time()
        kind = StepKind.of(batch)
        factor, cost = host.pace.factor(), host.pace.cost
        streams_s = factor * cost.of_streams(terms.streams, terms.context_tokens)
        prompts_s = factor * cost.of_prompts(terms.prompt_tokens > 0, terms.prompt_tokens, terms.prompt_pairs)

        def ended() -> None:
            seconds = host.virtual_loop.time() - begun_s
            self._borrowing.trials_of(kind).observe(kind, seconds, step.most_borrowed)
            if not done.cancelled():
                done.set_result(StepResult((SAMPLED,) * terms.streams, seconds))

        parts = [(streams_s, self._shared.streams), (prompts_s, self._shared.prompts)]
        step = RunningStep(parts, self._shared.borrows and self._borrowing.trials_of(kind).wanted, ended)
        self._cores.begin(self._core, step)


def calibrated_rates(host: PacedWorker) -> Rates:
    """Returns the costs that a worker begins with: those of its own core, without those that it may borrow."""
    rates, shape = Rates(), host.shape
    limits = CalibrationLimits(
        step_tokens=shape.step_tokens,
        max_model_len=host.facts.pages * shape.block_size,
        max_sequences=shape.max_num_seqs,
        pages=host.facts.pages,
        block_size=shape.block_size,
        runs_decode=host.role is Role.DECODE,
    )
    for batch in sweep(limits):
        terms = StepTerms.of(batch)
        rates.observe(terms, host.pace.cost.of(terms))
    return rates
