"""The CPU in the place of CUDA devices, in this process and in those of further ranks; processes share host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.unit.engine.reference_attention import reference_attention
from tests.unit.transfer.makers import HostSharing
from twostroke.engine import build, device_build, device_fit, device_ranks
from twostroke.engine.accelerator import CpuAccelerator, Recording
from twostroke.engine.device_fit import MemoryReading
from twostroke.engine.device_ranks import DeviceJob
from twostroke.kernels.attention_rules import AnyRules
from twostroke.kernels.parted_pool import AnyPool, RecordedAttention
from twostroke.ranks.group import RankGroup
from twostroke.scheduler.batch import Batch


def _attention(pool: AnyPool, *, heads: int, rules: AnyRules, dtype: torch.dtype, has_sinks: bool) -> RecordedAttention:
    assert dtype == torch.float32
    return reference_attention(pool, heads, rules)


def take_the_devices_place(patch: Callable[[Any, str, Any], None], job: type[DeviceJob] | None = None) -> None:
    """Let the CPU answer to the name of CUDA devices. `patch` is `setattr`, or pytest's, which undoes it."""
    patch(device_fit, "resolve_device", lambda _name: torch.device("cpu"))
    patch(device_ranks, "resolve_device", lambda _name: torch.device("cpu"))
    patch(build, "_build_on_cpu", build._build_on_device)
    patch(device_build, "read_memory", lambda _device: MemoryReading("cuda:0", 8 << 30, 8 << 30))
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
