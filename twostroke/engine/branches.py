"""The table of the engine's branches: which backend computes a worker's steps, and what each branch gives it.

What loads torch is imported where it is used: a fleet of paced workers does without.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.config import WorkerConfig
from twostroke.config.worker import check_gpu_adapters
from twostroke.engine.adapters.paced import PacedAdapters
from twostroke.engine.backends.built import Backend
from twostroke.engine.backends.paced.backend import PacedBackend
from twostroke.engine.extras import ForeignCode, RunnerBranches
from twostroke.models.weights.stored.model_files import layouts_in

if TYPE_CHECKING:
    import torch

    from twostroke.engine.backends.cpu.backend import CpuPlan
    from twostroke.engine.backends.cuda.backend import CudaPlan
    from twostroke.models.spec import ModelSpec


def paced_backend() -> PacedBackend:
    return PacedBackend(PacedAdapters)


def cpu_backend(config: WorkerConfig, spec: ModelSpec, model_dir: Path, _device: torch.device) -> Backend[CpuPlan]:
    from twostroke.engine.adapters.model_adapters import ModelAdapters
    from twostroke.engine.backends.cpu.backend import CpuBackend
    from twostroke.engine.ranks.cpu import RankedOnCpus

    code = code_of(spec)
    # Foreign code cannot add adapters to its matrix products.
    branches = RunnerBranches(ModelAdapters if code is None else None, code)
    backend = CpuBackend(spec, model_dir, layouts_in(model_dir), branches)
    return RankedOnCpus(backend) if config.ranks > 1 else backend


def cuda_backend(config: WorkerConfig, spec: ModelSpec, model_dir: Path, device: torch.device) -> Backend[CudaPlan]:
    """Returns the backend of CUDA devices.

    Raises ConfigError where the machine has too few of them, or where GPUs do not compute what is configured.
    """
    from twostroke.engine.backends.cuda.backend import CudaBackend
    from twostroke.engine.backends.cuda.fit import devices_from, read_memory
    from twostroke.engine.ranks.cuda import RankedOnDevices

    config.model.check_on_gpu()  # before a device is touched
    devices = [(each, read_memory(each)) for each in devices_from(device, config.ranks)]
    backend = CudaBackend(spec, model_dir, layouts_in(model_dir), devices)
    check_gpu_adapters(config.model, config.adapters, config.role)
    return RankedOnDevices(backend) if config.ranks > 1 else backend


def code_of(spec: ModelSpec) -> ForeignCode | None:
    """Returns the foreign code that computes a model; None where our decoders do."""
    if spec.generic is None:
        return None
    from twostroke.engine.generic.trial import GenericCode  # loads transformers, which our decoders do without

    return GenericCode()
