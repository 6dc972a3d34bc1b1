"""The backend of CUDA devices: a plan for each device of a worker, and the engine of a worker with one device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.base.errors import EngineLost
from twostroke.config import WorkerConfig
from twostroke.device.memory import DeviceMemory
from twostroke.engine.backends.built import BuiltEngine, closed_on_error
from twostroke.engine.backends.cuda.accelerator import accelerator_for
from twostroke.engine.backends.cuda.plan import DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.engine.backends.facts import LoadedModel, model_facts
from twostroke.engine.backends.memory_plan import MemoryPlan, MemoryUse, PlannedPool, ProcessNeeds
from twostroke.engine.determinism import DEVICE
from twostroke.kv_cache.form import page_form
from twostroke.kv_cache.groups.page_group import groups_apart
from twostroke.kv_cache.memory import Pages
from twostroke.models.decoders.choice import stored_key_centers
from twostroke.models.families.table import layouts_named
from twostroke.models.memory_needs import MemoryReading
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.formats import open_weights
from twostroke.models.weights.stored.model_files import LayoutOf
from twostroke.observability.profiler import Profiler


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """What each device of a worker computes, and what the worker's pages will be."""

    config: WorkerConfig
    spec: ModelSpec
    """The whole model."""
    model_dir: Path
    devices: tuple[DevicePlan, ...]
    memory: MemoryPlan

    def facts(self) -> LoadedModel:
        """Returns the facts about the model, for which it reads small files. Raises what opening them raises."""
        is_converted, dtype = self.config.kv_format != self.config.peer_kv_format, self.devices[0].torch_dtype
        centers = stored_key_centers(self.model_dir, self.spec, dtype) if is_converted else None
        return model_facts(self.config, self.memory, self.spec, self.model_dir, centers)

    def built(
        self, facts: LoadedModel, memory: Pages, runner: DeviceRunner, lost: Future[EngineLost] | None = None
    ) -> BuiltEngine:
        """Returns the engine of a loaded runner: that of the first device."""
        weights = MemoryUse("weights", self.memory.weights.total, None)
        return BuiltEngine(facts, memory, runner, DEVICE, weights=weights, expert_load=runner.expert_load, lost=lost)


class CudaBackend:
    """See `twostroke.engine.backends.built.Backend`.

    It plans a model for one or several devices, and loads it on one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model_dir: Path,
        layouts: LayoutOf | None,
        devices: Sequence[tuple[torch.device, MemoryReading]],
    ) -> None:
        """`layouts` gives the layout of each matrix in the model's files. `devices` are the worker's, each with a
        reading of its memory."""
        self.spec = spec
        self.layout_of = layouts_named(layouts, spec)
        self._model_dir = model_dir
        self._devices = devices

    def plan(self, config: WorkerConfig, shares: tuple[ModelSpec, ...] = ()) -> CudaPlan:
        """Returns what each device computes. `shares` divide the whole model among the devices.

        Raises ConfigError for a model or a page form that devices do not compute, and where a device has too little
        memory.
        """
        spec, form, block_size = self.spec, page_form(config.kv_format), config.cache.block_size
        form.check_shape(spec.page_shape(block_size))
        devices = tuple(
            DevicePlan.of(config, share, device, self.layout_of)
            for share, (device, _) in zip(shares or (spec,), self._devices, strict=True)
        )
        by_whole_blocks = any(page_form(each).spans_block for each in (config.kv_format, config.peer_kv_format))
        groups = groups_apart(spec.page_groups, by_whole_blocks=by_whole_blocks)
        shapes = spec.page_shapes(block_size, groups)
        pool = PlannedPool(
            config=config,
            groups=groups,
            sizes=tuple(map(form.page_bytes, shapes)),
            longest_sequence=spec.max_position_embeddings,
            on_gpu=True,
        )
        needs = tuple(ProcessNeeds(each.weights, each.needs().working_bytes) for each in devices)
        # The device with the least room decides how many pages there are.
        pages = min(each.pages(config.cache, read) for each, (_, read) in zip(devices, self._devices, strict=True))
        page_bytes = spec.page_bytes(block_size, config.kv_format)
        memory = pool.plan(pages * page_bytes, shapes, needs, weights_kind=config.model.dtype)
        return CudaPlan(config, spec, self._model_dir, devices, memory)

    def load(self, plan: CudaPlan, profiler: Profiler | None) -> BuiltEngine:
        del profiler  # the profiler cannot see the parts of a step on a device
        # The host samples the rows that need more than a plain draw: penalties, bias or logprobs.
        torch.set_num_threads(plan.config.runtime.threads)
        (own,), facts = plan.devices, plan.facts()
        memory = DeviceMemory(facts.pages, facts.page_bytes, own.device, *facts.further)
        with (
            closed_on_error(memory),
            open_weights(plan.model_dir, own.torch_dtype, own.device, keeps_codes=True) as files,
        ):
            runner = make_device_runner(own, files, memory.regions, accelerator_for(own.device))
        return plan.built(facts, memory, runner)
