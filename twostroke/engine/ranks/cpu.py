"""A worker of several ranks on CPUs: the first rank, and the others, which load their shares in processes of their
own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from twostroke.base.errors import ConfigError, EngineLost
from twostroke.config import WorkerConfig
from twostroke.config.worker import ranks_flag
from twostroke.engine.backends.built import BuiltEngine, closed_on_error
from twostroke.engine.backends.cpu.backend import CpuBackend, CpuPlan
from twostroke.engine.backends.cpu.runner import ModelRunner
from twostroke.engine.cores.cores import check_threads
from twostroke.engine.extras import ExtraMessage, OtherProcesses, RunnerBranches
from twostroke.kernels.cpu.choice import choose_kernels
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.catalog.places import cache_dir
from twostroke.models.families.table import layouts_named
from twostroke.models.known_specs import known_spec
from twostroke.models.shares.share import shares_of
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.observability.profiler import Profiler
from twostroke.ranks.collectives import RankSums
from twostroke.ranks.group import RankGroup, slot_bytes_for
from twostroke.ranks.processes import RankCare, RankProcesses
from twostroke.ranks.rank import RankJob
from twostroke.scheduler.batch import Batch

SUM_BYTES: Final = 4
"""Bytes of one number in a sum over ranks, a float32."""


@dataclass(frozen=True, slots=True)
class ModelJob(RankJob):
    """One rank's share of a model, over its part of the worker's pages."""

    config: str
    """A WorkerConfig as JSON."""
    model_dir: Path
    branches: RunnerBranches
    layout: PoolLayout
    pages_fd: int

    def load(self, group: RankGroup) -> Callable[[Batch | ExtraMessage], None]:
        """Loads the share, and returns what carries out a message. Raises ConfigError for what cannot be loaded."""
        config = WorkerConfig.from_json(self.config)
        spec = known_spec(self.model_dir, config.model.max_model_len, config.model.model_impl)
        backend = CpuBackend(spec, self.model_dir, layouts_in(self.model_dir), self.branches)
        plan = RankedOnCpus(backend).plan(config)
        memory = PageMemory.join(self.pages_fd, self.layout)
        runner = plan.runner(memory, index=group.rank, collective=RankSums(group, spec.vocab_size))
        receiver = runner.extra.receiver()

        def do(message: Batch | ExtraMessage) -> None:
            if isinstance(message, Batch):
                runner.run(message)
            else:
                message.on(receiver)

        return do


class FirstRank(RankSums):
    """The sums of the rank that tells the others what to compute."""

    def __init__(self, processes: RankProcesses, vocab_size: int) -> None:
        super().__init__(processes.group, vocab_size)
        self._processes = processes

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns a context in which this rank computes a step, while the other ranks compute the same one. It may
        raise RankLost."""
        return self._processes.step(batch.without_draws())

    def tell(self, message: ExtraMessage) -> None:
        """Has the other ranks carry out a message between steps. Raises RankLost."""
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
        """Returns a plan with a share for each rank.

        Raises what the backend raises, and ConfigError where ranks cannot share the model.
        """
        spec, layouts, ranks = self._backend.spec, self._backend.layouts, config.ranks
        flag = ranks_flag(config.model, config.role)
        is_int8 = config.model.weights == "int8"
        plan = self._backend.plan(
            config, shares_of(spec, ranks, layouts_named(layouts, spec), is_int8=is_int8, flag=flag)
        )
        sums_bytes = 2 * ranks * slot_bytes_for(_most_bytes(plan)) if ranks > 1 else 0
        return replace(plan, memory=replace(plan.memory, shared_bytes=sums_bytes))

    def load(self, plan: CpuPlan, profiler: Profiler | None) -> BuiltEngine:
        check_threads(plan.config.runtime.threads, processes=plan.config.ranks)
        lost = Future[EngineLost]()
        facts, memory = plan.facts(), plan.page_memory(writers=True)
        with closed_on_error(memory):
            runner, processes, ranks = _ranked_runner(plan, memory, profiler, lost)
        others = OtherProcesses(ranks.tell, processes.aside)
        return plan.built(facts, memory, runner, [os.getpid(), *processes.pids], others=others, lost=lost)


def _most_bytes(plan: CpuPlan) -> int:
    """Returns the bytes of the longest sum."""
    return plan.config.schedule.step_tokens() * plan.spec.hidden_size * SUM_BYTES


def start_ranks(
    config: WorkerConfig, job: RankJob, most_bytes: int, descriptor: int, lost: Future[EngineLost]
) -> RankProcesses:
    """Starts the other ranks of a worker. They inherit `descriptor`, which their job needs.

    `most_bytes` are those of the longest sum. `lost` gets the error when ranks are lost that have loaded. Raises
    ConfigError where they cannot be started.
    """
    kernels = choose_kernels(cache_dir() / "kernels")
    if kernels is None:  # ranks show each other through them that they run
        raise ConfigError(f"--tp {config.ranks} needs a C++ compiler", field="--tp")
    care = RankCare(config.patience.dead_after_s, config.worker_id, lost.set_result)
    return RankProcesses(kernels, job, config.ranks, most_bytes, care, (descriptor,))


def _ranked_runner(
    plan: CpuPlan, memory: PageMemory, profiler: Profiler | None, lost: Future[EngineLost]
) -> tuple[ModelRunner, RankProcesses, FirstRank]:
    """Returns the runner of the first rank, the processes of the other ranks, and the first rank's sums.

    All ranks have loaded then, and `memory` is protected. `lost` gets the error when ranks are lost afterwards. Raises
    ConfigError for what cannot be loaded.
    """
    config = plan.config
    job = ModelJob(config.to_json(), plan.model_dir, plan.branches, memory.layout, memory.fd)
    processes = start_ranks(config, job, _most_bytes(plan), memory.fd, lost)
    try:
        ranks = FirstRank(processes, plan.spec.vocab_size)
        with processes.loading():
            runner = plan.runner(memory, collective=ranks, profiler=profiler)
        processes.wait_until_ready()
        memory.protect()
    except BaseException:
        processes.close()
        raise
    return runner, processes, ranks
