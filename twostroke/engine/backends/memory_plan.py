"""The bytes and pages of a worker, counted before a file of weights is opened or a device is touched. No torch here.

A worker claims what its backend plans, and `twostroke bill` shows the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.base.errors import ConfigError
from twostroke.config import WorkerConfig
from twostroke.kv_cache.groups.page_group import PageGroup
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.memory import Pages
from twostroke.kv_cache.pool_size import PoolSize
from twostroke.kv_cache.windows.pool_share import SharedPool
from twostroke.models.memory_needs import WeightBytes
from twostroke.page_forms.page_form import PageShape


@dataclass(frozen=True, slots=True)
class ProcessNeeds:
    """What one process of a worker holds besides pages."""

    weights: WeightBytes
    working_bytes: int
    """Bytes for the activations and logits of one step, the process and its libraries."""

    @property
    def total_bytes(self) -> int:
        return self.weights.total + self.working_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of a worker: its pages, and what its processes hold besides."""

    longest: int
    """Most tokens of a request, prompt and answer together."""
    groups: tuple[PageGroup, ...]
    """The layers of each page group."""
    shapes: tuple[PageShape, ...]
    """The dimensions of a whole page of each group; none for a paced model, whose pages have one size in every form."""
    layout: PoolLayout
    size: PoolSize
    processes: tuple[ProcessNeeds, ...] = ()
    """The processes that compute together; none for a paced model, which computes nothing."""
    weights_kind: str = "none"
    """The format in which processes hold their weights."""
    shared_bytes: int = 0
    """Bytes of the memory in which the processes add up their results."""

    @property
    def weights(self) -> WeightBytes:
        """Bytes of all processes' weights, and how many of them a step reads."""
        found = [each.weights for each in self.processes]
        return WeightBytes(sum(each.total for each in found), sum(each.step for each in found))

    @property
    def working_bytes(self) -> int:
        return sum(each.working_bytes for each in self.processes) + self.shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPool:
    """What the pages of a worker follow from, besides the bytes that are available for them."""

    config: WorkerConfig
    groups: tuple[PageGroup, ...]
    sizes: tuple[int, ...]
    """Bytes of a page of each group."""
    longest_sequence: int
    """Most tokens of a sequence that the model was made for."""
    on_gpu: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest request. Raises ConfigError where --max-model-len is more than the model was made
        for."""
        wanted = self.config.model.max_model_len
        if wanted is not None and wanted > self.longest_sequence:
            raise ConfigError(
                f"--max-model-len {wanted} is more than the {self.longest_sequence} tokens that the model was made for",
                field="max_model_len",
            )
        return wanted or self.longest_sequence

    def plan(
        self,
        memory_bytes: int,
        shapes: tuple[PageShape, ...] = (),
        processes: tuple[ProcessNeeds, ...] = (),
        *,
        weights_kind: str = "none",
        beside: Sequence[int] | None = None,
    ) -> MemoryPlan:
        """Returns what fits into this many bytes. Raises ConfigError where that is too little.

        `beside`: for each group, the bytes that each of its pages takes elsewhere in the same memory.
        """
        taken = tuple(map(sum, zip(self.sizes, beside or [0] * len(self.sizes), strict=True)))
        pool = SharedPool.of(self.config, self.groups, taken, longest=self.longest, on_gpu=self.on_gpu)
        regions = zip(pool.layout(memory_bytes).regions, self.sizes, strict=True)
        layout = PoolLayout(tuple(PageRegion(region.pages, size) for region, size in regions))
        return MemoryPlan(
            longest=self.longest,
            groups=self.groups,
            shapes=shapes,
            layout=layout,
            size=pool.size_of(layout),
            processes=processes,
            weights_kind=weights_kind,
        )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One part of a worker's memory."""

    part: str
    """What this part holds, such as "pages" or "weights"."""
    billed_bytes: int
    """Bytes as `twostroke bill` counts them."""
    measured_bytes: int | None
    """Bytes that the operating system reports; None where it does not measure this part separately."""


def pages_use(memory: Pages) -> MemoryUse:
    return MemoryUse("pages", memory.layout.host_bytes, memory.held_bytes)
