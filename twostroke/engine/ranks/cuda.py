"""A worker of several ranks on devices: each has a device, its share of the weights and its part of every page there.

All ranks compute the same batches, so they record the same decode steps, in the same order, and replay the same ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.base.errors import EngineLost, RankLost
from twostroke.config import WorkerConfig
from twostroke.config.worker import ranks_flag
from twostroke.device.memory import DeviceMemory
from twostroke.device.sharing import CudaSharing
from twostroke.device.staging import PoolPart, StagedAccess
from twostroke.device.stream import copy_stream
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.backends.cuda.accelerator import accelerator_for
from twostroke.engine.backends.cuda.backend import CudaBackend, CudaPlan
from twostroke.engine.backends.cuda.fit import devices_from, resolve_device
from twostroke.engine.backends.cuda.plan import DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.engine.ranks.cpu import start_ranks
from twostroke.kv_cache.layout import PageRegion, PoolLayout, generation_bytes
from twostroke.kv_cache.memory import PageAccess, Pages, PoolLocation
from twostroke.models.decoders.collective import Collective
from twostroke.models.known_specs import known_spec
from twostroke.models.shares.share import check_shared_out, share_of
from twostroke.models.spec import ModelSpec, Share
from twostroke.models.weights.stored.formats import open_weights
from twostroke.observability.profiler import Profiler
from twostroke.ranks.collectives import DeviceSums, Meeting, end_waits, leave_group
from twostroke.ranks.group import FIRST, RankGroup
from twostroke.ranks.processes import RankProcesses
from twostroke.ranks.rank import RankJob
from twostroke.scheduler.batch import Batch

PAGES = "pages"
"""Key of what each rank leaves for the first one: the handle that opens its part of the pages."""


@dataclass(frozen=True, slots=True)
class DeviceJob(RankJob):
    """One rank's share of a model on its device."""

    config: str
    """A WorkerConfig as JSON."""
    model_dir: Path
    layout: PoolLayout
    """The layout of a rank's part of the pages."""
    meeting_fd: int

    def load(self, group: RankGroup) -> Callable[[Batch], None]:
        """Loads the share, and returns what computes a step. Raises ConfigError for what cannot be loaded."""
        config = WorkerConfig.from_json(self.config)
        spec = known_spec(self.model_dir, config.model.max_model_len, config.model.model_impl)
        device = devices_from(resolve_device(config.model.device), config.ranks)[group.rank]
        plan = DevicePlan.of(
            config, share_of(spec, group.rank, group.ranks), device
        )  # without layouts: quantised weights are not shared out
        memory = _memory_on(plan.device, self.layout)
        meeting = Meeting(self.meeting_fd, group.rank, group.ranks)
        meeting.leave(PAGES, CudaSharing().share(memory.tensor))

        def join() -> Collective:
            _meet(group, meeting, plan)
            return DeviceSums(group.rank, _widths(spec, group.ranks))

        torch.set_num_threads(config.runtime.threads)
        runner = _runner(plan, self.model_dir, memory, join)

        def compute(batch: Batch) -> None:
            runner.run(batch)

        return compute

    def end_waits(self) -> None:
        """Ends this rank's waits for sums."""
        end_waits()


class FirstDeviceSums(DeviceSums):
    """The sums of the rank that tells the others what to compute."""

    def __init__(self, processes: RankProcesses, widths: Sequence[int], fd: int) -> None:
        """`fd` is the meeting's descriptor. `close` closes it."""
        super().__init__(FIRST, widths)
        self._processes = processes
        self._fd = fd

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns a context in which this rank computes a step, while the other ranks compute the same one. It may
        raise RankLost."""
        return self._processes.step(batch.without_draws())

    def close(self) -> None:
        """Ends the other ranks."""
        self._processes.close()
        leave_group()
        os.close(self._fd)


class RankedOnDevices:
    """A backend over that of CUDA devices: the first rank is this process, and the others load beside it."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend

    def plan(self, config: WorkerConfig) -> CudaPlan:
        """Returns a plan with a share for each rank.

        Raises what the backend raises, and ConfigError where ranks cannot share the model.
        """
        spec, ranks = self._backend.spec, config.ranks
        flag = ranks_flag(config.model, config.role)
        check_shared_out(flag, ranks, has_codes=self._backend.layout_of is not None)
        return self._backend.plan(config, tuple(share_of(spec, rank, ranks) for rank in range(ranks)))

    def load(self, plan: CudaPlan, profiler: Profiler | None) -> BuiltEngine:
        del profiler  # steps of a device are not shown part by part
        torch.set_num_threads(plan.config.runtime.threads)
        lost, facts = Future[EngineLost](), plan.facts()
        memory, runner = _ranked_runner(plan, lost)
        return plan.built(facts, memory, runner, lost)


def _ranked_runner(loading: CudaPlan, lost: Future[EngineLost]) -> tuple[RankedDeviceMemory, DeviceRunner]:
    """Returns the pages and the runner of the first rank, whose other ranks have loaded too.

    `lost` gets the error when ranks are lost afterwards. Raises ConfigError for what cannot be loaded.
    """
    config, model_dir, plans, layout = loading.config, loading.model_dir, loading.devices, loading.memory.layout
    ranks, plan = len(plans), plans[FIRST]
    own_layout = _part_of(layout, plan.page_ranges)
    with contextlib.ExitStack() as undo:
        memory = _memory_on(plan.device, own_layout)
        undo.callback(memory.close)
        fd = os.memfd_create("twostroke-meeting", os.MFD_CLOEXEC)
        undo.callback(os.close, fd)
        job = DeviceJob(config.to_json(), model_dir, own_layout, fd)
        processes = start_ranks(config, job, 0, fd, lost)
        undo.callback(leave_group)
        undo.callback(processes.close)
        meeting = Meeting(fd, FIRST, ranks)

        def join() -> Collective:
            _meet(processes.group, meeting, plan)
            return FirstDeviceSums(processes, _widths(plan.spec.whole, ranks), fd)

        with processes.loading():
            runner = _runner(plan, model_dir, memory, join)
        processes.wait_until_ready()
        sharing = CudaSharing()
        others = [sharing.open(meeting.left_by(rank, PAGES), plans[rank].device) for rank in range(1, ranks)]
        undo.pop_all()
    return RankedDeviceMemory(layout, plan.page_ranges, memory, others), runner


def _meet(group: RankGroup, meeting: Meeting, plan: DevicePlan) -> None:
    """Joins the process group once all ranks have loaded their weights.

    A rank that fails before that ends the waits of all ranks; one that fails later may not. Raises RankLost.
    """
    group.meet()
    try:
        meeting.join(plan.device)
    except RuntimeError as error:
        raise RankLost(f"the ranks of this worker cannot join: {error}") from error


def _runner(plan: DevicePlan, model_dir: Path, memory: DeviceMemory, join: Callable[[], Collective]) -> DeviceRunner:
    accelerator = accelerator_for(plan.device)
    with accelerator.guard(), open_weights(model_dir, plan.torch_dtype, plan.device, keeps_codes=True) as files:
        return make_device_runner(plan, files, memory.regions, accelerator, join=join)


def _widths(spec: ModelSpec, ranks: int) -> list[int]:
    """Returns how many tokens of the vocabulary each rank has."""
    return [len(Share(rank, ranks, spec).of(spec.vocab_size)) for rank in range(ranks)]


def _part_of(layout: PoolLayout, ranges: int) -> PoolLayout:
    """Returns the layout of a rank's parts of the pages."""
    return PoolLayout(tuple(PageRegion(region.pages, region.page_bytes // ranges) for region in layout.regions))


def _memory_on(device: torch.device, layout: PoolLayout) -> DeviceMemory:
    first, *further = layout.regions
    return DeviceMemory(first.pages, first.page_bytes, device, *further)


class RankedDeviceMemory(Pages):
    """Pages that are divided among ranks: a page is its ranges side by side, as in `JointForm`. Ranks that have the
    same range each hold a copy."""

    def __init__(self, layout: PoolLayout, ranges: int, own: DeviceMemory, others: Sequence[torch.Tensor]) -> None:
        """`layout` is that of whole pages. `own` has the first rank's part of each page, and is closed with this
        object.

        `others` are the parts of the other ranks, in their order: uint8 [bytes], laid out as `own.layout`.
        """
        assert layout.page_sizes == tuple(ranges * size for size in own.layout.page_sizes)
        self.layout = layout
        self._own = own
        self._memories = (own.tensor, *others)
        self._ranges = ranges
        self.generations = own.generations

    def access(self, batch_pages: int) -> PageAccess:
        ranks = len(self._memories)
        parts = [
            PoolPart(memory, self._own.layout, copy_stream(memory.device), rank * self._ranges // ranks)
            for rank, memory in enumerate(self._memories)
        ]
        return StagedAccess(parts, self.layout, batch_pages)

    @property
    def place(self) -> PoolLocation | None:
        return None

    @property
    def held_bytes(self) -> int:
        size_bytes = self._own.layout.size_bytes
        return size_bytes * len(self._memories) + generation_bytes(self.pages)

    def close(self) -> None:
        """Frees this process's memory. That of the other ranks is freed as they end."""
        del self._memories, self.generations
        self._own.close()
