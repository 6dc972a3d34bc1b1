"""The backend of CPUs: what a worker holds of a model, and its runner, of the whole model or of one rank's share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from twostroke.base.errors import EngineLost
from twostroke.config import ModelConfig, Role, WorkerConfig
from twostroke.engine.adapters.slots import AdapterSlots, own_slots
from twostroke.engine.backends.built import BuiltEngine, KernelsInUse, closed_on_error
from twostroke.engine.backends.cpu.runner import ModelRunner, RunnerResources
from twostroke.engine.backends.facts import (
    GROUPS_APART,
    NATIVE_ORDER,
    PIECE_TOKENS,
    LoadedModel,
    conversion_of,
    model_facts,
    shared_pool,
)
from twostroke.engine.cores.cores import Cores, check_threads
from twostroke.engine.memory_use import MemoryUse
from twostroke.kernels.choice import grouped_pool
from twostroke.kernels.cpu.build import arithmetic_identity
from twostroke.kernels.cpu.choice import choose_kernels, variant_and_reason
from twostroke.kernels.page_forms.nibble_pool import check_shape
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kv_cache.form import AnyForm, Conversion, PageShape, RankedForm, check_latents, page_form
from twostroke.kv_cache.groups.page_group import PageGroup
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.catalog.places import cache_dir
from twostroke.models.decoders.choice import stored_key_centers
from twostroke.models.families.table import layouts_named
from twostroke.models.memory_needs import packed_weights, plain_weights, stored_weights
from twostroke.models.ranks.interface import Ranks
from twostroke.models.ranks.shared_out import pages_of_share
from twostroke.models.ranks.stored_shares import shares_in
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.packed_file import mapped_bytes
from twostroke.models.weights.packed_weights import packed_folder
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.observability.profiler import Profiler


@dataclass(frozen=True, slots=True)
class CpuModel:
    """What all ranks of a worker know before any of them loads its weights."""

    config: WorkerConfig
    spec: ModelSpec
    """The whole model. Each rank computes a share of it."""
    model_dir: Path
    groups: tuple[PageGroup, ...]
    form: AnyForm
    shapes: tuple[PageShape, ...]
    """The dimensions of a whole page of each group."""
    centers: torch.Tensor | None
    """float32 [layers, kv_heads, head_dim]"""
    shares: tuple[ModelSpec, ...]
    """What each rank computes; the whole model where there is one."""

    @classmethod
    def of(cls, config: WorkerConfig, spec: ModelSpec, model_dir: Path) -> Self:
        """Raises ConfigError where pages cannot have the form that is asked for, or ranks cannot share the model."""
        groups, form = spec.page_groups, page_form(config.kv_format)
        shapes = spec.page_shapes(config.cache.block_size, groups)
        shares = shares_in(model_dir, spec, config.ranks, is_int8=config.model.weights == "int8")
        check_threads(config.runtime.threads, ranks=config.ranks)
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        check_latents(shapes[0], form)
        if form.spans_block:
            check_shape(shapes[0])
        centers = stored_key_centers(model_dir, spec, dtype)
        return cls(config, spec, model_dir, groups, form, shapes, centers, shares)

    def runner(
        self,
        memory: PageMemory,
        *,
        rank: int = 0,
        ranks: Ranks | None = None,
        profiler: Profiler | None = None,
        slots_over: Callable[[AdapterSlots], AdapterSlots] = own_slots,
    ) -> ModelRunner:
        """Claims cores and loads the weights, those of one rank where there are several.

        Raises ConfigError for what cannot be loaded.
        """
        runtime, spec = self.config.runtime, self.shares[rank]
        cores = Cores.claim(runtime.threads, pin=runtime.pin, borrow=runtime.borrow and ranks is None)
        try:
            return ModelRunner(
                self.model_dir,
                spec,
                memory,
                self.config.model,
                pool=self._pool(spec, memory),
                on=RunnerResources(cores, profiler or Profiler(), ranks, slots_over),
                with_head=self.config.can_sample,
            )
        except BaseException:
            cores.close()
            raise

    def _pool(self, spec: ModelSpec, memory: PageMemory) -> AnyPool:
        form, centers = self.form, self.centers
        regions = [*map(torch.from_numpy, memory.regions)]
        if spec.share is not None:
            assert isinstance(form, RankedForm), "pages say how many ranks share them"
            regions = pages_of_share(regions, form, spec.share)
            form, heads = form.inner, spec.share.of(self.spec.kv_heads)
            centers = None if centers is None else centers[:, heads.start : heads.stop]
        shapes = spec.page_shapes(self.config.cache.block_size, self.groups)
        return grouped_pool(regions, form, shapes, getattr(torch, self.config.model.dtype), centers)


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A worker's model, and what its pages will be."""

    model: CpuModel
    facts: LoadedModel
    conversion: Conversion | None
    """How pages become those of the other form, in the order of tokens that plain torch keeps."""
    arithmetic: str
    """What the fingerprint says of the kernels, or empty."""

    def weight_bytes(self, *, is_packed: bool) -> int:
        """Returns what the weights of all ranks take. `is_packed`: native kernels compute them."""
        model, with_head = self.model.config.model, self.model.config.can_sample
        return sum(
            billed_weights(model, each, self.model.model_dir, is_packed=is_packed, with_head=with_head)
            for each in self.model.shares
        )

    def memory(self, *, writers: bool = False) -> PageMemory:
        """Claims the page memory. `writers`: other processes write to it."""
        return PageMemory(self.facts.pages, self.facts.page_bytes, *self.facts.windows, writers=writers)

    def built(
        self, memory: PageMemory, runner: ModelRunner, pids: Sequence[int], lost: Future[EngineLost] | None = None
    ) -> BuiltEngine:
        """Returns the engine, with what the runner adds to the facts. `pids` are the processes of its ranks."""
        config, model, conversion = self.model.config, self.model, self.conversion
        has_pieces = runner.has_native_pages and model.shapes[0].latent_rank is None
        if conversion is not None and has_pieces and config.cache.block_size % PIECE_TOKENS == 0:
            conversion = _in_pieces(conversion)
        apart = GROUPS_APART if len(model.groups) > 1 else ""
        fingerprint = f"{self.facts.fingerprint}{apart}{NATIVE_ORDER if has_pieces else ''}{self.arithmetic}"
        return BuiltEngine(
            replace(self.facts, fingerprint=fingerprint, conversion=conversion),
            memory,
            runner,
            runner.determinism,
            neighbours=runner if runner.can_borrow and config.ranks == 1 else None,
            kernels=KernelsInUse(
                *variant_and_reason(runner.kernels), config.runtime.threads * config.ranks, config.ranks
            ),
            adapters=runner.slots,
            weights=_weights_use(self, pids, is_packed=runner.has_packed_weights),
            expert_load=runner.expert_load,
            lost=lost,
        )


class CpuBackend:
    """See `twostroke.engine.backends.interface.Backend`. Its plan holds for any number of ranks; it loads one."""

    def __init__(self, spec: ModelSpec, model_dir: Path) -> None:
        self._spec = spec
        self._model_dir = model_dir

    def plan(self, config: WorkerConfig) -> CpuPlan:
        spec = self._spec
        model = CpuModel.of(config, spec, self._model_dir)
        conversion = conversion_of(config, model.shapes, model.groups, model.centers)
        layout = _layout_of(config, spec, model.groups, conversion)
        facts = model_facts(config, spec, self._model_dir, layout, model.groups)
        return CpuPlan(model, facts, conversion, _cpu_arithmetic(config) if config.model.deterministic else "")

    def load(self, plan: CpuPlan, profiler: Profiler | None) -> BuiltEngine:
        memory = plan.memory()
        with closed_on_error(memory):
            runner = plan.model.runner(memory, profiler=profiler)
        return plan.built(memory, runner, [os.getpid()])


def billed_weights(model: ModelConfig, spec: ModelSpec, model_dir: Path, *, is_packed: bool, with_head: bool) -> int:
    """Returns the bytes of the weights of a model, or of one rank's share of it, on a CPU."""
    if not is_packed:
        return plain_weights(spec, model.dtype, with_head=with_head).total
    layouts = layouts_in(model_dir)
    if layouts is not None:
        return stored_weights(spec, layouts_named(layouts, spec), with_head=with_head).total
    return packed_weights(spec, is_int8=model.weights == "int8", with_head=with_head).total


def _cpu_arithmetic(config: WorkerConfig) -> str:
    """Returns what a fingerprint says of the kernels: pages that another machine computed may have other bits."""
    identity = arithmetic_identity(choose_kernels(cache_dir() / "kernels"))
    return f";arithmetic={identity}-{config.runtime.threads}"


def _in_pieces(conversion: Conversion) -> Conversion:
    """Returns a conversion of pages in the native order, in each group."""
    further = None if conversion.further is None else replace(conversion.further, has_pieces=True)
    return replace(conversion, has_pieces=True, further=further)


def _layout_of(
    config: WorkerConfig, spec: ModelSpec, groups: tuple[PageGroup, ...], conversion: Conversion | None
) -> PoolLayout:
    """Returns what the page memory of a worker on a CPU holds. Raises ConfigError where that is too little."""
    form, shapes = page_form(config.kv_format), spec.page_shapes(config.cache.block_size, groups)
    sizes = tuple(map(form.page_bytes, shapes))
    taken = list(sizes)
    if conversion is not None and config.role is Role.PREFILL:  # each page that is pulled has a converted one beside it
        taken = [own + each.page_bytes for own, each in zip(sizes, conversion.groups, strict=True)]
    shared = shared_pool(config, groups, tuple(taken), spec.max_position_embeddings)
    counts = [region.pages for region in shared.layout(config.cache.host_bytes).regions]
    first, *further = map(PageRegion, counts, sizes)
    return PoolLayout.of(first.pages, first.page_bytes, *further)


def _weights_use(plan: CpuPlan, pids: Sequence[int], *, is_packed: bool) -> MemoryUse:
    """Returns what the weights of all ranks take, which the processes `pids` have."""
    measured = [mapped_bytes(packed_folder(), pid) if is_packed else 0 for pid in pids]
    return MemoryUse("weights", plan.weight_bytes(is_packed=is_packed), sum(measured) if all(measured) else None)
