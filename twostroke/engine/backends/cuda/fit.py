"""Finds the device that a worker computes on, and its free memory, before anything is loaded."""

from __future__ import annotations

import torch

from twostroke.base.errors import ConfigError
from twostroke.models.memory_needs import MemoryReading


def resolve_device(name: str) -> torch.device:
    """Returns the device that --device names. Raises ConfigError where this machine does not have it."""
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if count == 0:
        reason = "this torch is a build for CPUs alone" if torch.version.cuda is None else "torch finds no CUDA device"
        raise ConfigError(f"--device {name}: {reason}; use --device cpu", field="device")
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError(f"--device {name}: this machine's last CUDA device is cuda:{count - 1}", field="device")
    return torch.device("cuda", index)


def devices_from(first: torch.device, count: int) -> tuple[torch.device, ...]:
    """Returns the device of each process of a worker: the first one and those after it.

    Raises ConfigError where there are fewer.
    """
    if first.type != "cuda":
        return (first,) * count
    seen = torch.cuda.device_count() - first.index
    if count > seen:
        raise ConfigError(
            f"--tp {count} takes as many CUDA devices, and from {first} on this worker sees {seen}; give a "
            "smaller number, more devices or --device cpu",
            field="--tp",
        )
    return tuple(torch.device("cuda", first.index + offset) for offset in range(count))


def read_memory(device: torch.device) -> MemoryReading:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryReading(str(device), free_bytes, total_bytes)
