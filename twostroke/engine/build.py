"""Builds a worker's engine from its config: one backend plans it and loads it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import Backend, BuiltEngine, Plan
from twostroke.engine.branches import cpu_backend, cuda_backend, paced_backend
from twostroke.models.file_versions import FileVersions
from twostroke.models.weights.digest import weights_digest
from twostroke.observability.profiler import Profiler


def build_runner(config: WorkerConfig, model_dir: Path | None, profiler: Profiler | None = None) -> BuiltEngine:
    """Claims the page memory and loads the model. `model_dir` is None only for a paced model.

    The runner records the parts of its steps in `profiler`. Raises ConfigError or UnsupportedModel, also where the
    model's files were changed while they were loaded.
    """
    if config.model.is_paced:
        return _plan_and_load(paced_backend(), config, profiler)
    assert model_dir is not None, "a real model needs its directory"
    return _build_model(config, model_dir, profiler)


def _build_model(config: WorkerConfig, model_dir: Path, profiler: Profiler | None) -> BuiltEngine:
    # These load torch: hundreds of MB and seconds that a fleet of paced workers does without.
    from twostroke.engine.backends.cuda.fit import resolve_device
    from twostroke.models.known_specs import known_spec

    device = resolve_device(config.model.device)
    versions = FileVersions.now(model_dir)  # before anything of them is read, by any process of the worker
    spec = known_spec(model_dir, config.model.max_model_len, config.model.model_impl)
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as thread:
        weights = thread.submit(weights_digest, versions)  # while the model is loaded
        if device.type == "cpu":
            built = _plan_and_load(cpu_backend(config, spec, model_dir, device), config, profiler)
        else:
            built = _plan_and_load(cuda_backend(config, spec, model_dir, device), config, profiler)
        try:
            fingerprint = f"{built.model.fingerprint};tensors={weights.result()}"
            versions.check_unchanged()
        except BaseException:
            built.close()
            raise
    return replace(built, model=replace(built.model, fingerprint=fingerprint))


def _plan_and_load(backend: Backend[Plan], config: WorkerConfig, profiler: Profiler | None) -> BuiltEngine:
    """Loads what the backend plans for a config. Raises ConfigError where the configured length does not fit."""
    plan = backend.plan(config)
    if config.model.max_model_len is not None:
        plan.memory.size.check(config.model.max_model_len)
    return backend.load(plan, profiler)
