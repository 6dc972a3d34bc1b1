"""Which device a worker computes on, and how many pages fit there: decided before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.config import MIN_PAGES, CacheConfig
from twostroke.engine.page_count import enough_pages
from twostroke.errors import ConfigError

CONTEXT_BYTES = 1 << 30
"""For what we do not count: the driver's context, libraries' workspaces, recorded graphs, fragmentation."""

DRAW_BYTES = 40
"""Per logit of a row that is drawn on the device: float32 values and int64 counters, and what they become."""

KEPT_BYTES = 4
"""Per logit of a recorded row, at most: every recording keeps its own."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A reading of one device."""

    device: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeeds:
    """What one worker puts on its device beside pages."""

    weight_bytes: int
    working_bytes: int
    """For one step's activations and logits, and what libraries take."""
    page_bytes: int


def resolve_device(name: str) -> torch.device:
    """The device that --device names. Raises ConfigError where this machine does not have it."""
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


def read_memory(device: torch.device) -> MemoryReading:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryReading(str(device), free_bytes, total_bytes)


def working_bytes(hidden: int, intermediate: int, vocab: int, *, tokens: int, samples: int, recorded: int) -> int:
    """Return a generous size of a step's widest moment: in and out of the widest layer, and draws from all logits.

    `recorded`: rows of all recordings together.
    """
    activations = tokens * (8 * hidden + 6 * intermediate) * 4
    return CONTEXT_BYTES + activations + vocab * (samples * DRAW_BYTES + recorded * KEPT_BYTES)


def device_pages(memory: MemoryReading, needs: DeviceNeeds, cache: CacheConfig) -> int:
    """How many pages a worker keeps on the device.

    Raises ConfigError, saying by how many bytes, where the device is too small for weights, working memory and pages.
    """
    fixed_bytes = needs.weight_bytes + needs.working_bytes
    least_bytes = cache.kv_cache_memory_bytes or MIN_PAGES * needs.page_bytes
    wanted_bytes = fixed_bytes + least_bytes + needs.page_bytes  # the last for the scratch page
    if wanted_bytes > memory.free_bytes:
        raise ConfigError(
            f"--device {memory.device} is {wanted_bytes - memory.free_bytes} bytes too small: weights take "
            f"{needs.weight_bytes}, working memory {needs.working_bytes}, pages {least_bytes + needs.page_bytes}, but "
            f"only {memory.free_bytes} of its {memory.total_bytes} bytes are free",
            field="kv_cache_memory" if cache.kv_cache_memory_bytes else "device",
        )
    if cache.kv_cache_memory_bytes is not None:
        return enough_pages(cache.kv_cache_memory_bytes, needs.page_bytes)
    share_bytes = min(int(memory.total_bytes * cache.device_share), memory.free_bytes)
    pages = (share_bytes - fixed_bytes) // needs.page_bytes - 1
    if pages < MIN_PAGES:
        raise ConfigError(
            f"--device {memory.device}: this worker's share of its memory is {share_bytes} bytes, "
            f"{wanted_bytes - share_bytes} too few for weights ({needs.weight_bytes}), working memory "
            f"({needs.working_bytes}) and {MIN_PAGES} pages; give --kv-cache-memory, or start fewer workers on it",
            field="kv_cache_memory",
        )
    return pages
