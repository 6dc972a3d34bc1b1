"""A real model on a CUDA device: how many pages fit, and its runner with weights and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from twostroke.config import CacheConfig, WorkerConfig
from twostroke.engine.backends.cuda.accelerator import Accelerator
from twostroke.engine.backends.cuda.decode_graphs import PageTable, graph_sizes
from twostroke.engine.backends.cuda.runner import DeviceRunner, StepLimits
from twostroke.kernels.choice import device_attention, device_elementwise, device_grouped, device_linears, grouped_pool
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.pools.parted_pool import AnyPool, RecordedAttention, exact_places
from twostroke.kernels.products.elementwise import Elementwise
from twostroke.kernels.products.grouped import GroupedProducts
from twostroke.kernels.products.linear import Linears
from twostroke.kv_cache.form import AnyForm, page_form
from twostroke.kv_cache.groups.page_group import page_groups
from twostroke.models.checks.device_check import check_computed
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.decoders.device_model import DeviceModel
from twostroke.models.families.table import named
from twostroke.models.memory_needs import (
    CONTEXT_BYTES,
    DeviceNeeds,
    MemoryReading,
    WeightBytes,
    device_pages,
    device_weights,
    exact_blocks,
    exact_bytes,
    working_bytes,
)
from twostroke.models.page_forms.balanced_keys import balanced, key_centers
from twostroke.models.rope import rope_tables
from twostroke.models.shares.shared_out import form_of_share, shared_out
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.model_files import LayoutOf
from twostroke.models.weights.tensors import WeightSource, take_weights
from twostroke.page_forms.page_form import PageShape

COLLECTIVE_BYTES: Final = 1 << 30
"""Bytes for what several processes add on a device uncounted: NCCL's buffers, and the context of the first one, which
moves pages there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What one device computes: the model, or a share of it, and the sizes of its steps."""

    spec: ModelSpec
    device: torch.device
    dtype: str
    form: AnyForm
    """The form of the pages on this device. For a share they are parts of the worker's pages."""
    block_size: int
    max_model_len: int
    max_tokens: int
    max_sequences: int
    with_head: bool
    layout_of: LayoutOf | None = None
    """The layouts of matrices by the program's names; None where all of them are plain numbers."""

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        spec: ModelSpec,
        device: torch.device,
        layout_of: LayoutOf | None = None,
    ) -> DevicePlan:
        """Returns the plan of a model, or of a share of it. Raises ConfigError where devices do not compute it."""
        model, schedule = config.model, config.schedule
        longest = model.max_model_len or spec.max_position_embeddings
        check_computed(spec)
        return cls(
            spec=spec,
            device=device,
            dtype=model.dtype,
            form=form_of_share(page_form(config.kv_format), spec.share),
            block_size=config.cache.block_size,
            max_model_len=longest,
            max_tokens=schedule.step_tokens(on_gpu=device.type != "cpu"),
            max_sequences=schedule.max_num_seqs,
            with_head=config.can_sample,
            layout_of=layout_of,
        )

    def pages(self, cache: CacheConfig, reading: MemoryReading) -> int:
        """Returns how many pages fit. Raises ConfigError before anything is loaded if the device is too small."""
        if cache.kv_cache_memory_bytes is not None:  # in whole pages of the worker
            own_bytes = cache.kv_cache_memory_bytes // self.page_ranges
            cache = cache.model_copy(update={"kv_cache_memory_bytes": own_bytes})
        return device_pages(reading, self.needs(), cache)

    @property
    def page_ranges(self) -> int:
        """Returns how many ranges of heads a page of the worker is divided into. One of them is on this device."""
        return self.spec.whole.kv_heads // self.spec.kv_heads

    def needs(self) -> DeviceNeeds:
        spec = self.spec
        samples = self.max_sequences if self.with_head else 0
        of_steps = working_bytes(
            spec,
            tokens=self.max_tokens,
            samples=samples,
            recorded=sum(graph_sizes(samples)),
            has_codes=self.layout_of is not None,
        )
        of_loading = CONTEXT_BYTES + spec.expert_bytes(self.dtype)  # before there are steps
        together = 0
        if spec.share is not None:
            together = COLLECTIVE_BYTES
            of_loading += spec.table_bytes(self.dtype) * self.with_head  # a part of the head is kept
        return DeviceNeeds(
            weight_bytes=self.weights.total,
            working_bytes=max(of_steps, of_loading)
            + together
            + exact_bytes(self.exact_blocks, self.form, spec.page_shape(self.block_size), self.dtype),
            page_bytes=spec.page_bytes(self.block_size, self.form.name),
        )

    @property
    def weights(self) -> WeightBytes:
        """Bytes of weights on the device, and how many of them a step reads."""
        return device_weights(self.spec, self.dtype, self.layout_of, with_head=self.with_head)

    @property
    def exact_blocks(self) -> int:
        return exact_blocks(self.form, self.block_size, tokens=self.max_tokens, sequences=self.max_sequences)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def limits(self, scratch_page: int, further_scratch_rows: tuple[int, ...] = ()) -> StepLimits:
        pages = PageTable(
            block_size=self.block_size,
            max_blocks=-(-self.max_model_len // self.block_size),
            scratch_page=scratch_page,
            further_scratch_rows=further_scratch_rows,
        )
        return StepLimits(max_tokens=self.max_tokens, max_sequences=self.max_sequences, pages=pages)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKernels:
    """The kernels of a model."""

    attention: RecordedAttention
    elementwise: Elementwise
    grouped: GroupedProducts
    linears: Linears

    @classmethod
    def over(cls, pool: AnyPool, spec: ModelSpec, dtype: torch.dtype) -> DeviceKernels:
        """Chooses the fastest kernels for this pool. Raises ConfigError if none can serve it."""
        attention = device_attention(pool, heads=spec.heads, rules=spec.rules, dtype=dtype, has_sinks=spec.has_sinks)
        device = pool.device
        return cls(attention, device_elementwise(device), device_grouped(device), device_linears(device))


def make_device_runner(
    plan: DevicePlan,
    source: WeightSource,
    regions: Sequence[torch.Tensor],
    accelerator: Accelerator,
    kernels_over: Callable[[AnyPool, ModelSpec, torch.dtype], DeviceKernels] = DeviceKernels.over,
    join: Callable[[], Collective] = Alone,
) -> DeviceRunner:
    """Makes the runner over pages on the device.

    `regions` are the pages of each page group, uint8 [pages + scratch, page bytes]: of one group, or of those that the
    spec names. `source` has the weights of the whole model. `join` connects this process to the others; it is called
    once the weights are loaded.
    """
    spec, whole = plan.spec, plan.spec.whole
    source = balanced(named(source, whole), whole)
    pool = _device_pool(regions, plan, key_centers(source, whole))
    kernels = kernels_over(pool, spec, plan.torch_dtype)
    weights = take_weights(shared_out(source, spec), spec, with_head=plan.with_head)
    model = DeviceModel(spec, weights, kernels.elementwise, kernels.grouped, kernels.linears, join())
    cosines, sines = (table.to(plan.device) for table in rope_tables(spec.ropes, plan.max_model_len))
    limits = plan.limits(len(regions[0]) - 1, tuple(len(region) - 1 for region in regions[1:]))
    rope, exact = (cosines, sines), exact_places(pool)
    return DeviceRunner(model, kernels.attention, rope, accelerator, limits, exact, with_head=plan.with_head)


def _device_pool(regions: Sequence[torch.Tensor], plan: DevicePlan, centers: torch.Tensor | None) -> AnyPool:
    """Returns the pool. The last page of each group is its scratch page. `centers` are those of the whole model's
    heads.
    """
    if centers is not None and plan.spec.share is not None:
        heads = plan.spec.share.of(plan.spec.whole.kv_heads)
        centers = centers[:, heads.start : heads.stop].contiguous()

    def exact_pages(shape: PageShape) -> ExactPages:
        return ExactPages.fixed(plan.exact_blocks, len(regions[0]) - 1, shape, plan.torch_dtype, plan.device)

    groups = plan.spec.page_groups if len(regions) > 1 else page_groups([None] * plan.spec.layers)
    shapes = plan.spec.page_shapes(plan.block_size, groups)
    return grouped_pool(regions, plan.form, shapes, plan.torch_dtype, centers, exact_pages)
