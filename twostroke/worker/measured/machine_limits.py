"""The machine's limits, for a profile: measured when first asked for, and kept for all workers and later runs.

Each trial takes some milliseconds of the engine thread, between two steps, so that steps of this worker do not
disturb it. Workers of one machine measure one after the other.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twostroke.base.cache_key import cache_key
from twostroke.config import WorkerConfig
from twostroke.engine.loop import EngineThread
from twostroke.kernels.cpu.variants import cpu_features, cpu_model
from twostroke.kernels.kept import kept_or_measured
from twostroke.models.catalog.places import cache_dir
from twostroke.rpc.v1 import control_pb2

if TYPE_CHECKING:  # torch, which a fleet of paced workers does without
    from twostroke.kernels.limits import Limits, Run

LIMITS_FILE: Final = "limits.json"
REPEATS: Final = 3
BUFFER_BYTES: Final = 192 << 20
"""Bytes of memory that are read: more than most caches hold, and read within some ten milliseconds."""
SHAPES: Final = ((512, 576, 3072), (1024, 1024, 1024))
"""Products that take some ten milliseconds of one core."""


async def limits_of(config: WorkerConfig, engine: EngineThread, *, is_on_cpu: bool) -> control_pb2.MachineLimits | None:
    """Returns what the threads of a worker can do at most; None if a device computes, or the model is paced."""
    if config.model.is_paced or not is_on_cpu:
        return None
    loop = asyncio.get_running_loop()

    def between_steps(call: Callable[[], None]) -> None:
        asyncio.run_coroutine_threadsafe(engine.between_steps(call), loop).result()

    limits = await asyncio.to_thread(kept_limits, cache_dir(), config, between_steps)
    return control_pb2.MachineLimits(**asdict(limits))


def kept_limits(folder: Path, config: WorkerConfig, run: Run) -> Limits:
    import torch

    from twostroke.kernels.limits import Limits, measured_limits

    threads, dtype = config.runtime.threads, config.model.dtype

    def measure() -> dict[str, Any]:
        limits = measured_limits(
            threads, getattr(torch, dtype), REPEATS, buffer_bytes=BUFFER_BYTES, shapes=SHAPES, run=run
        )
        return asdict(limits)

    return Limits(**kept_or_measured(folder / LIMITS_FILE, limits_key(config), measure))


def limits_key(config: WorkerConfig) -> str:
    """Returns the key under which the limits of such a worker are kept."""
    return cache_key(
        "machine limits",
        machine=platform.node(),
        processor=cpu_model(),
        features=cpu_features(),
        cores=os.cpu_count(),
        threads=config.runtime.threads,
        dtype=config.model.dtype,
    )
