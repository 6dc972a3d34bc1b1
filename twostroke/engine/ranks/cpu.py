"""The first rank of a worker with its other ranks, which load their shares of the model in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twostroke.base.errors import ConfigError, EngineLost
from twostroke.config import WorkerConfig
from twostroke.engine.adapters.ranked import (
    AdapterMessage,
    DropAdapter,
    OtherRankAdapters,
    PutAdapter,
    RankedAdapters,
)
from twostroke.engine.backends.built import BuiltEngine, closed_on_error
from twostroke.engine.backends.cpu.backend import CpuBackend, CpuModel, CpuPlan
from twostroke.engine.backends.cpu.runner import ModelRunner
from twostroke.kernels.cpu.choice import choose_kernels
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.catalog.places import cache_dir
from twostroke.models.known_specs import known_spec
from twostroke.observability.profiler import Profiler
from twostroke.ranks.group import RankGroup
from twostroke.ranks.processes import RankProcesses
from twostroke.ranks.rank import RankJob
from twostroke.ranks.sums import RankSums
from twostroke.scheduler.batch import Batch

SUM_BYTES: Final = 4
"""Bytes of a number of a sum over ranks, a float32."""


@dataclass(frozen=True, slots=True)
class ModelJob(RankJob):
    """One rank's share of a model, over its part of the worker's pages."""

    config: str
    """A WorkerConfig as JSON."""
    model_dir: Path
    layout: PoolLayout
    pages_fd: int

    def load(self, group: RankGroup) -> Callable[[Batch | AdapterMessage], None]:
        """Raises ConfigError for what cannot be loaded."""
        config = WorkerConfig.from_json(self.config)
        spec = known_spec(self.model_dir, config.model.max_model_len, config.model.model_impl)
        memory = PageMemory.join(self.pages_fd, self.layout)
        ranks = RankSums(group, spec.vocab_size)
        runner = CpuModel.of(config, spec, self.model_dir).runner(memory, rank=group.rank, ranks=ranks)

        adapters = OtherRankAdapters(runner.adapters)

        def do(message: Batch | AdapterMessage) -> None:
            if isinstance(message, Batch):
                runner.run(message)
            else:
                message.on(adapters)

        return do


class FirstRank(RankSums):
    """The sums of the rank that tells the others what to compute."""

    def __init__(self, processes: RankProcesses, vocab_size: int) -> None:
        super().__init__(processes.group, vocab_size)
        self._processes = processes

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Computes the step within; the other ranks do the same. Raises RankLost."""
        return self._processes.step(batch.without_draws())

    def tell(self, message: PutAdapter | DropAdapter) -> None:
        """Lets the other ranks do what it says, between steps. Raises RankLost."""
        self._processes.send(message)
        self._processes.finish()

    def close(self) -> None:
        """Ends the other ranks."""
        self._processes.close()


class RankedOnCpus:
    """A backend over that of CPUs: the first rank is this process, and the others load beside it."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend

    def plan(self, config: WorkerConfig) -> CpuPlan:
        return self._backend.plan(config)

    def load(self, plan: CpuPlan, profiler: Profiler | None) -> BuiltEngine:
        lost = Future[EngineLost]()
        memory = plan.memory(writers=True)
        with closed_on_error(memory):
            runner, others = _ranked_runner(plan.model, memory, profiler, lost)
        return plan.built(memory, runner, [os.getpid(), *others], lost)


def _ranked_runner(
    model: CpuModel, memory: PageMemory, profiler: Profiler | None, lost: Future[EngineLost]
) -> tuple[ModelRunner, list[int]]:
    """Returns the runner of the first rank, whose other ranks have loaded too, and the process ids of those.

    `memory` is protected then. `lost` gets the error when ranks are lost afterwards. Raises ConfigError for what cannot
    be loaded.
    """
    kernels = choose_kernels(cache_dir() / "kernels")
    if kernels is None:
        raise ConfigError(f"--tp {model.config.ranks} needs a C++ compiler", field="--tp")
    job = ModelJob(model.config.to_json(), model.model_dir, memory.layout, memory.fd)
    most_rows = model.config.schedule.step_tokens(on_gpu=False)
    most_bytes = most_rows * model.spec.hidden_size * SUM_BYTES
    processes = RankProcesses(
        kernels,
        job,
        model.config.ranks,
        most_bytes,
        frozen_s=model.config.patience.dead_after_s,
        worker=model.config.worker_id,
        descriptors=(memory.fd,),
        on_lost=lost.set_result,
    )
    try:
        ranks = FirstRank(processes, model.spec.vocab_size)
        with processes.loading():
            runner = model.runner(
                memory,
                ranks=ranks,
                profiler=profiler,
                slots_over=lambda own: RankedAdapters(own, processes.aside, ranks.tell),
            )
        processes.wait_until_ready()
        memory.protect()
    except BaseException:
        processes.close()
        raise
    return runner, processes.pids
