"""The backend of CPUs: it plans the memory of a worker, and makes runners of a whole model or of a share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from twostroke.base.errors import EngineLost
from twostroke.config import Role, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine, KernelsInUse, closed_on_error
from twostroke.engine.backends.cpu.runner import ModelRunner, RunnerResources
from twostroke.engine.backends.facts import NATIVE_ORDER, PIECE_TOKENS, LoadedModel, model_facts
from twostroke.engine.backends.memory_plan import MemoryPlan, MemoryUse, PlannedPool, ProcessNeeds
from twostroke.engine.cores.cores import Cores, check_threads
from twostroke.engine.extras import NO_BRANCHES, OtherProcesses, RunnerBranches
from twostroke.kernels.choice import grouped_pool
from twostroke.kernels.cpu.build import arithmetic_identity
from twostroke.kernels.cpu.choice import choose_kernels, variant_and_reason
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kv_cache.form import Conversion, check_latents, page_form
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.catalog.places import cache_dir
from twostroke.models.decoders.choice import stored_key_centers
from twostroke.models.decoders.collective import Collective
from twostroke.models.memory_needs import DRAW_BYTES, HOST_PROCESS_BYTES, plain_weights, step_bytes, weights_on_cpu
from twostroke.models.shares.shared_out import pages_of_share
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.packed_file import mapped_bytes
from twostroke.models.weights.packed_weights import packed_folder
from twostroke.models.weights.stored.model_files import LayoutOf
from twostroke.observability.profiler import Profiler

LOGIT_BYTES: Final = 4
"""Bytes of a logit of a process that sends its logits to the first one and draws nothing."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A worker's model, and the memory that its processes and pages take."""

    config: WorkerConfig
    spec: ModelSpec
    """The whole model. Each process computes a share of it."""
    model_dir: Path
    shares: tuple[ModelSpec, ...]
    """What each process computes: its share, or the whole model where there is one process."""
    memory: MemoryPlan
    branches: RunnerBranches

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.model.dtype)
        return dtype

    def facts(self) -> LoadedModel:
        """Returns the facts about the model, for which it reads small files. Raises what opening them raises."""
        is_converted = self.config.kv_format != self.config.peer_kv_format
        centers = stored_key_centers(self.model_dir, self.spec, self.dtype) if is_converted else None
        return model_facts(self.config, self.memory, self.spec, self.model_dir, centers)

    def page_memory(self, *, writers: bool = False) -> PageMemory:
        """Claims the page memory. `writers`: whether other processes write to it."""
        first, *further = self.memory.layout.regions
        return PageMemory(first.pages, first.page_bytes, *further, writers=writers)

    def runner(
        self,
        memory: PageMemory,
        *,
        index: int = 0,
        collective: Collective | None = None,
        profiler: Profiler | None = None,
    ) -> ModelRunner:
        """Claims cores, loads the weights of a share, and returns its runner. Raises ConfigError for what cannot be
        loaded."""
        runtime, spec = self.config.runtime, self.shares[index]
        cores = Cores.claim(runtime.threads, pin=runtime.pin, borrow=runtime.borrow and collective is None)
        try:
            return ModelRunner(
                self.model_dir,
                spec,
                memory,
                self.config.model,
                pool=self._pool(spec, memory),
                resources=RunnerResources(cores, profiler or Profiler(), collective, self.branches),
                with_head=self.config.can_sample,
            )
        except BaseException:
            cores.close()
            raise

    def _pool(self, spec: ModelSpec, memory: PageMemory) -> AnyPool:
        form, regions = page_form(self.config.kv_format), [*map(torch.from_numpy, memory.regions)]
        centers = stored_key_centers(self.model_dir, self.spec, self.dtype)
        if spec.share is not None:
            regions, form = pages_of_share(regions, form, spec.share)
            heads = spec.share.of(self.spec.kv_heads)
            centers = None if centers is None else centers[:, heads.start : heads.stop]
        shapes = spec.page_shapes(self.config.cache.block_size, self.memory.groups)
        return grouped_pool(regions, form, shapes, self.dtype, centers)

    def built(
        self,
        facts: LoadedModel,
        memory: PageMemory,
        runner: ModelRunner,
        pids: Sequence[int],
        *,
        others: OtherProcesses | None = None,
        lost: Future[EngineLost] | None = None,
    ) -> BuiltEngine:
        """Returns the engine. What the runner computes with completes the fingerprint. `pids` are its processes'
        ids."""
        config, conversion, processes = self.config, facts.conversion, len(self.shares)
        has_pieces = runner.has_native_pages and self.spec.latents is None
        if conversion is not None and has_pieces and config.cache.block_size % PIECE_TOKENS == 0:
            conversion = _in_pieces(conversion)
        arithmetic = _arithmetic(config) if config.model.deterministic else ""
        fingerprint = f"{facts.fingerprint}{NATIVE_ORDER if has_pieces else ''}{arithmetic}"
        threads = config.runtime.threads * processes
        return BuiltEngine(
            replace(facts, fingerprint=fingerprint, conversion=conversion),
            memory,
            runner,
            runner.determinism,
            neighbours=runner if runner.is_native and processes == 1 else None,
            kernels=KernelsInUse(*variant_and_reason(runner.kernels), threads, processes),
            offers=runner.extra.offers(others),
            weights=self._weights_use(pids, is_packed=runner.is_native),
            expert_load=runner.expert_load,
            lost=lost,
        )

    def _weights_use(self, pids: Sequence[int], *, is_packed: bool) -> MemoryUse:
        """Returns the memory of all processes' weights. `is_packed`: whether native kernels compute with them."""
        model, total = self.config.model, self.memory.weights.total
        if not is_packed:
            with_head = self.config.can_sample
            total = sum(plain_weights(each, model.dtype, with_head=with_head).total for each in self.shares)
        measured = [mapped_bytes(packed_folder(), pid) if is_packed else 0 for pid in pids]
        return MemoryUse("weights", total, sum(measured) if all(measured) else None)


class CpuBackend:
    """See `twostroke.engine.backends.built.Backend`. It can plan shares of a model, but loads only whole models."""

    def __init__(
        self, spec: ModelSpec, model_dir: Path, layouts: LayoutOf | None, branches: RunnerBranches = NO_BRANCHES
    ) -> None:
        """`layouts` gives the layout of each matrix in the model's files. `branches` have no influence on a plan."""
        self.spec = spec
        self.layouts = layouts
        self._model_dir = model_dir
        self._branches = branches

    def plan(self, config: WorkerConfig, shares: tuple[ModelSpec, ...] = ()) -> CpuPlan:
        """Returns a worker's plan. `shares` divide the whole model.

        Raises ConfigError where pages cannot have the configured form.
        """
        spec, form, shares = self.spec, page_form(config.kv_format), shares or (self.spec,)
        shapes = spec.page_shapes(config.cache.block_size, spec.page_groups)
        check_latents(shapes[0], form)
        form.check_shape(shapes[0])
        pool = PlannedPool(
            config=config,
            groups=spec.page_groups,
            sizes=tuple(map(form.page_bytes, shapes)),
            longest_sequence=spec.max_position_embeddings,
        )
        needs, (kind, *_) = zip(*(self._needs(config, share) for share in shares), strict=True)
        beside = None
        if config.role is Role.PREFILL and config.peer_kv_format != config.kv_format:
            beside = [page_form(config.peer_kv_format).page_bytes(shape) for shape in shapes]  # converted pages
        memory = pool.plan(config.cache.host_bytes, shapes, needs, weights_kind=kind, beside=beside)
        return CpuPlan(config, spec, self._model_dir, shares, memory, self._branches)

    def load(self, plan: CpuPlan, profiler: Profiler | None) -> BuiltEngine:
        check_threads(plan.config.runtime.threads)
        facts, memory = plan.facts(), plan.page_memory()
        with closed_on_error(memory):
            runner = plan.runner(memory, profiler=profiler)
        return plan.built(facts, memory, runner, [os.getpid()])

    def _needs(self, config: WorkerConfig, share: ModelSpec) -> tuple[ProcessNeeds, str]:
        """Returns the memory that a process takes besides pages, and the format in which it holds its weights."""
        model, schedule, with_head = config.model, config.schedule, config.can_sample
        weights, kind = weights_on_cpu(
            share, model.dtype, self.layouts, is_int8=model.weights == "int8", with_head=with_head
        )
        rows = schedule.max_num_seqs if with_head else 0
        draws = share.share is None or share.share.is_first
        logits = rows * (share.vocab_size * DRAW_BYTES if draws else len(share.vocabulary) * LOGIT_BYTES)
        of_step = step_bytes(share, schedule.step_tokens())
        return ProcessNeeds(weights, HOST_PROCESS_BYTES + of_step + logits), kind


def _arithmetic(config: WorkerConfig) -> str:
    """Returns the fingerprint's field for the kernels: those of another machine may compute other bits."""
    identity = arithmetic_identity(choose_kernels(cache_dir() / "kernels"))
    return f";arithmetic={identity}-{config.runtime.threads}"


def _in_pieces(conversion: Conversion) -> Conversion:
    """Returns a conversion of pages in the native order, of all groups."""
    further = tuple(replace(each, has_pieces=True) for each in conversion.further)
    return replace(conversion, has_pieces=True, further=further)
