"""The CPU in the place of CUDA devices, in this process and in those of further ranks; processes share host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.unit.engine.reference_attention import reference_attention
from tests.unit.transfer.makers import HostSharing
from twostroke.engine import build
from twostroke.engine.backends.cuda import fit as device_fit
from twostroke.engine.backends.cuda import plan as device_build
from twostroke.engine.backends.cuda.accelerator import CpuAccelerator, Recording
from twostroke.engine.backends.cuda.fit import MemoryReading
from twostroke.engine.branches import cuda_backend
from twostroke.engine.ranks import cuda as device_ranks
from twostroke.engine.ranks.cuda import DeviceJob
from twostroke.kernels.attention.rules import AnyRules
from twostroke.kernels.pools.parted_pool import AnyPool, RecordedAttention
from twostroke.ranks.group import RankGroup
from twostroke.scheduler.batch import Batch


def _attention(pool: AnyPool, *, heads: int, rules: AnyRules, dtype: torch.dtype, has_sinks: bool) -> RecordedAttention:
    assert dtype == torch.float32
    return reference_attention(pool, heads, rules)


def take_the_devices_place(patch: Callable[[Any, str, Any], None], job: type[DeviceJob] | None = None) -> None:
    """Lets the CPU answer to the name of CUDA devices. `patch` is `setattr`, or pytest's, which undoes it."""
    patch(device_fit, "resolve_device", lambda _name: torch.device("cpu"))
    patch(device_ranks, "resolve_device", lambda _name: torch.device("cpu"))
    patch(build, "cpu_backend", cuda_backend)
    patch(device_fit, "read_memory", lambda _device: MemoryReading("cuda:0", 8 << 30, 8 << 30))
    patch(device_build, "device_attention", _attention)
    patch(device_ranks, "CudaSharing", HostSharing)
    patch(device_ranks, "DeviceJob", job or HostDeviceJob)


@dataclass(frozen=True, slots=True)
class HostDeviceJob(DeviceJob):
    """A further rank, whose process is another one than that of the test."""

    def load(self, group: RankGroup) -> Callable[[Batch], None]:
        take_the_devices_place(setattr)
        return DeviceJob.load(self, group)


@dataclass(frozen=True, slots=True)
class CannotRecord(HostDeviceJob):
    """All ranks have joined when this one fails."""

    def load(self, group: RankGroup) -> Callable[[Batch], None]:
        def fail(*_args: object) -> Recording:
            raise torch.OutOfMemoryError("no room for recordings")

        CpuAccelerator.record = fail  # type: ignore[method-assign]
        return HostDeviceJob.load(self, group)
