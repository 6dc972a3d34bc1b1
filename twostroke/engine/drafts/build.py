"""Builds a worker's draft model. It has page memory of its own, and runs on the threads of the worker's model."""

from __future__ import annotations

from pathlib import Path

from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.backends.memory_plan import MemoryUse
from twostroke.engine.branches import code_of
from twostroke.engine.drafts.engine import DraftEngine
from twostroke.engine.extras import RunnerBranches
from twostroke.kv_cache.memory import PageMemory, available_memory_bytes
from twostroke.models.drafts.check import (
    CACHE_FLAG,
    check_draft,
    check_draft_size,
    draft_dir,
    plan_draft,
)
from twostroke.models.file_versions import FileVersions


def build_draft(config: WorkerConfig, built: BuiltEngine) -> DraftEngine | None:
    """Loads the draft model beside the model of a worker that can decode. None: no draft model is configured.

    Native kernels compute it in int8, unless its weights are quantised already.
    Raises ConfigError where it cannot propose tokens for the model, does not fit into memory, or was changed during
    loading.
    """
    name = config.schedule.draft_model
    if name is None or not config.can_sample:
        return None
    directory = draft_dir(name, config.model.dtype)
    if directory is None:
        raise ConfigError(f"draft model {name!r} is not on this machine; run: twostroke model pull {name}")
    versions = FileVersions.now(directory)
    check_draft(name, directory, Path(built.model.model_dir))
    check_draft_size(name, directory, Path(built.model.model_dir), config.model)
    draft = _build_on_cpu(config, built, name, directory)
    try:
        versions.check_unchanged()
    except BaseException:
        draft.close()
        raise
    return draft


def _build_on_cpu(config: WorkerConfig, built: BuiltEngine, name: str, directory: Path) -> DraftEngine:
    import torch

    from twostroke.engine.backends.cpu.runner import ModelRunner, RunnerResources
    from twostroke.kernels.choice import grouped_pool

    if not isinstance(built.runner, ModelRunner):
        raise ConfigError(f"--draft-model {name} is computed on CPUs only: give --device cpu", field="--draft-model")
    plan = plan_draft(directory, config.model, config.cache, config.schedule, is_packed=built.runner.is_native)
    spec, longest = plan.spec, min(built.model.max_model_len, plan.spec.max_position_embeddings)
    if spec.vocab_size != built.model.vocab_size:
        raise ConfigError(
            f"--draft-model {name} draws from {spec.vocab_size} tokens, and the model from {built.model.vocab_size}",
            field="--draft-model",
        )
    model = ModelConfig(
        model=name,
        dtype=config.model.dtype,
        weights="int8" if plan.is_int8 else "model",
        max_model_len=longest,
        device=config.model.device,
    )
    _check_room(name, plan.weights.total)
    memory = PageMemory(plan.pages, plan.page_bytes, flag=CACHE_FLAG)
    try:
        runner = ModelRunner(
            directory,
            spec,
            memory,
            model,
            pool=grouped_pool(
                [torch.from_numpy(memory.regions[0])], plan.form, plan.shapes, getattr(torch, model.dtype)
            ),
            resources=RunnerResources(built.runner, branches=RunnerBranches(code=code_of(spec))),
            with_head=True,
        )
    except BaseException:
        memory.close()
        raise
    uses = (
        MemoryUse("draft pages", memory.layout.host_bytes, memory.held_bytes),
        MemoryUse("draft weights", plan.weights.total, None),
    )
    return DraftEngine(runner, memory, config.cache.block_size, longest, uses)


def _check_room(name: str, weight_bytes: int) -> None:
    """Raises ConfigError where the draft model's weights do not fit into the memory of this machine."""
    free_bytes = available_memory_bytes()
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"--draft-model {name} needs {weight_bytes} bytes for its weights, but this machine has {free_bytes} free",
            field="--draft-model",
        )
