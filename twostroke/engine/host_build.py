"""How a worker on CPUs makes its runner: of the whole model, or of the share that one of its ranks has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from twostroke.config import WorkerConfig
from twostroke.engine.adapter_slots import AdapterSlots, own_slots
from twostroke.engine.cores import Cores, check_threads
from twostroke.engine.runner import ModelRunner, RunnerResources
from twostroke.kernels.choice import grouped_pool
from twostroke.kernels.nibble_pool import check_shape
from twostroke.kernels.parted_pool import AnyPool
from twostroke.kv_cache.form import AnyForm, PageShape, RankedForm, check_latents, page_form
from twostroke.kv_cache.groups import PageGroup
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.choice import stored_key_centers
from twostroke.models.ranks import Ranks
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.shared_out import pages_of_share
from twostroke.models.weights.stored_shares import shares_in
from twostroke.profiler import Profiler


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What all ranks of a worker know before any of them loads its weights."""

    config: WorkerConfig
    spec: ModelSpec
    """The whole model, of which each rank computes a share."""
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
        """Claim cores and load the weights, those of one rank where there are several.

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
