"""The backend of CUDA devices: a plan for each rank's device, and the runner of a worker that has one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from twostroke.base.errors import EngineLost
from twostroke.config import WorkerConfig
from twostroke.config.worker import check_gpu_adapters, ranks_flag
from twostroke.device.memory import DeviceMemory
from twostroke.engine.backends.built import BuiltEngine, closed_on_error
from twostroke.engine.backends.cuda.accelerator import accelerator_for
from twostroke.engine.backends.cuda.plan import DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.engine.backends.facts import GROUPS_APART, LoadedModel, conversion_of, model_facts, shared_pool
from twostroke.engine.determinism import DEVICE
from twostroke.engine.memory_use import MemoryUse
from twostroke.kernels.page_forms.nibble_pool import check_shape
from twostroke.kv_cache.form import page_form
from twostroke.kv_cache.groups.page_group import PageGroup, groups_apart
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import Pages
from twostroke.models.checks.device_check import check_shared_out
from twostroke.models.decoders.choice import stored_key_centers
from twostroke.models.families.table import layouts_named
from twostroke.models.memory_needs import MemoryReading
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.formats import open_weights
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.observability.profiler import Profiler


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """What each rank of a worker computes on its device, and what the worker's pages will be."""

    config: WorkerConfig
    model_dir: Path
    ranks: tuple[DevicePlan, ...]
    facts: LoadedModel

    @property
    def weight_bytes(self) -> int:
        """What the weights of all ranks take."""
        return sum(each.needs().weight_bytes for each in self.ranks)

    def built(self, memory: Pages, runner: DeviceRunner, lost: Future[EngineLost] | None = None) -> BuiltEngine:
        """Returns the engine of a loaded runner: the first rank's, where there are several."""
        weights = MemoryUse("weights", self.weight_bytes, None)
        return BuiltEngine(
            self.facts, memory, runner, DEVICE, weights=weights, expert_load=runner.expert_load, lost=lost
        )


class CudaBackend:
    """See `twostroke.engine.backends.interface.Backend`. It plans any number of ranks, and loads one."""

    def __init__(
        self, spec: ModelSpec, model_dir: Path, devices: Sequence[torch.device], readings: Sequence[MemoryReading]
    ) -> None:
        """`devices` are those of the ranks; `readings` say how much memory each of them has."""
        self._spec = spec
        self._model_dir = model_dir
        self._devices = devices
        self._readings = readings

    def plan(self, config: WorkerConfig) -> CudaPlan:
        spec, form = self._spec, page_form(config.kv_format)
        if form.spans_block:
            check_shape(spec.page_shape(config.cache.block_size))
        ranks = self._plans(config)
        groups = _groups_of(config, spec)
        shapes = spec.page_shapes(config.cache.block_size, groups)
        layout = self._layout(config, ranks, groups)
        facts = model_facts(config, spec, self._model_dir, layout, groups)
        centers = stored_key_centers(self._model_dir, spec, ranks[0].torch_dtype)
        apart = GROUPS_APART if len(groups) > 1 else ""
        facts = replace(
            facts,
            conversion=conversion_of(config, shapes, groups, centers),
            fingerprint=f"{facts.fingerprint}{apart}",
        )
        return CudaPlan(config, self._model_dir, ranks, facts)

    def load(self, plan: CudaPlan, profiler: Profiler | None) -> BuiltEngine:
        del profiler  # steps of a device are not shown part by part
        torch.set_num_threads(plan.config.runtime.threads)  # of what the host computes: rows with more than a token
        (own,), facts = plan.ranks, plan.facts
        memory = DeviceMemory(facts.pages, facts.page_bytes, own.device, *facts.windows)
        with (
            closed_on_error(memory),
            open_weights(plan.model_dir, own.torch_dtype, own.device, keeps_codes=True) as files,
        ):
            runner = make_device_runner(own, files, memory.regions, accelerator_for(own.device))
        return plan.built(memory, runner)

    def _plans(self, config: WorkerConfig) -> tuple[DevicePlan, ...]:
        """Raises ConfigError where the model, or what changes it, cannot be shared out."""
        layouts = layouts_in(self._model_dir)
        layout_of = None if layouts is None else layouts_named(layouts, self._spec)
        check_shared_out(ranks_flag(config.model, config.role), config.ranks, has_codes=layout_of is not None)
        check_gpu_adapters(config.model, config.adapters, config.role)
        return tuple(
            DevicePlan.of(config, self._spec, device, layout_of, rank) for rank, device in enumerate(self._devices)
        )

    def _layout(self, config: WorkerConfig, ranks: Sequence[DevicePlan], groups: tuple[PageGroup, ...]) -> PoolLayout:
        """Returns what the pages of the rank with the least room take. Raises ConfigError where that is too little."""
        spec, form, block_size = self._spec, page_form(config.kv_format), config.cache.block_size
        sizes = tuple(map(form.page_bytes, spec.page_shapes(block_size, groups)))
        shared = shared_pool(config, groups, sizes, spec.max_position_embeddings, on_gpu=True)
        pages = min(rank.pages(config.cache, has) for rank, has in zip(ranks, self._readings, strict=True))
        return shared.layout(pages * spec.page_bytes(block_size, config.kv_format))


def _groups_of(config: WorkerConfig, spec: ModelSpec) -> tuple[PageGroup, ...]:
    """Returns the page groups that the pools of workers on devices keep apart."""
    spans_block = any(page_form(each).spans_block for each in (config.kv_format, config.peer_kv_format))
    return groups_apart(spec.page_groups, by_whole_blocks=spans_block)
