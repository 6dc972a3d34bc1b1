"""From a worker's config to what computes its steps: one backend plans and loads it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.backends.interface import Backend, plan_and_load
from twostroke.engine.backends.paced.backend import PacedBackend
from twostroke.models.file_versions import FileVersions
from twostroke.models.weights.digest import weights_digest
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.observability.profiler import Profiler

if TYPE_CHECKING:  # torch, which a fleet of paced workers does without
    import torch

    from twostroke.engine.backends.cpu.backend import CpuPlan
    from twostroke.engine.backends.cuda.backend import CudaPlan
    from twostroke.models.spec import ModelSpec


def build_runner(config: WorkerConfig, model_dir: Path | None, profiler: Profiler | None = None) -> BuiltEngine:
    """Claims the page memory and loads the model. `model_dir` is None only for a paced model.

    The runner shows `profiler` the parts of its steps. Raises ConfigError or UnsupportedModel before anything is
    started, also where the model's files were changed while it was loaded.
    """
    if config.model.is_paced:
        return plan_and_load(PacedBackend(), config, profiler)
    assert model_dir is not None, "a real model needs its directory"
    return _build_model(config, model_dir, profiler)


def _build_model(config: WorkerConfig, model_dir: Path, profiler: Profiler | None) -> BuiltEngine:
    # These load torch: hundreds of MB and seconds that a fleet of paced workers does without.
    from twostroke.engine.backends.cuda.fit import resolve_device
    from twostroke.models.known_specs import known_spec

    device = resolve_device(config.model.device)
    versions = FileVersions.now(model_dir)  # before anything of them is read, by this process or by another rank
    spec = known_spec(model_dir, config.model.max_model_len, config.model.model_impl)
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as thread:
        weights = thread.submit(weights_digest, versions)  # while the model is loaded
        if device.type == "cpu":
            built = plan_and_load(_cpu_backend(config, spec, model_dir, device), config, profiler)
        else:
            built = plan_and_load(_cuda_backend(config, spec, model_dir, device), config, profiler)
        try:
            fingerprint = f"{built.model.fingerprint};tensors={weights.result()}"
            versions.check_unchanged()
        except BaseException:
            built.close()
            raise
    return replace(built, model=replace(built.model, fingerprint=fingerprint))


def _cpu_backend(config: WorkerConfig, spec: ModelSpec, model_dir: Path, _device: torch.device) -> Backend[CpuPlan]:
    from twostroke.engine.backends.cpu.backend import CpuBackend
    from twostroke.engine.ranks.cpu import RankedOnCpus

    backend = CpuBackend(spec, model_dir, layouts_in(model_dir))
    return RankedOnCpus(backend) if config.ranks > 1 else backend


def _cuda_backend(config: WorkerConfig, spec: ModelSpec, model_dir: Path, device: torch.device) -> Backend[CudaPlan]:
    from twostroke.engine.backends.cuda.backend import CudaBackend
    from twostroke.engine.backends.cuda.fit import devices_from, read_memory
    from twostroke.engine.ranks.cuda import RankedOnDevices

    config.model.check_on_gpu()  # before a device is touched
    devices = [(each, read_memory(each)) for each in devices_from(device, config.ranks)]
    backend = CudaBackend(spec, model_dir, layouts_in(model_dir), devices)
    return RankedOnDevices(backend) if config.ranks > 1 else backend
