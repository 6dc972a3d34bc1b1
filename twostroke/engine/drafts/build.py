"""From a worker's config to its draft model: the page memory of its own, and a runner on the model's threads."""

from __future__ import annotations

from pathlib import Path

from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.drafts.engine import DraftEngine
from twostroke.engine.memory_use import MemoryUse
from twostroke.kv_cache.memory import PageMemory, available_memory_bytes
from twostroke.models.drafts.check import (
    CACHE_FLAG,
    check_draft,
    check_draft_size,
    draft_dir,
    draft_pool,
    is_drafted_in_int8,
)
from twostroke.models.file_versions import FileVersions
from twostroke.models.known_specs import known_spec
from twostroke.models.weights.stored.model_files import layouts_in


def build_draft(config: WorkerConfig, built: BuiltEngine) -> DraftEngine | None:
    """Loads the draft model beside the model of a worker that can decode; None where there is none.

    Native kernels compute it in int8, unless its weights are quantised already.
    Raises ConfigError where it cannot propose tokens for the model, does not fit into memory, or was changed while it
    was loaded.
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

    from twostroke.engine.backends.cpu.backend import billed_weights
    from twostroke.engine.backends.cpu.runner import ModelRunner, RunnerResources
    from twostroke.kernels.choice import grouped_pool

    if not isinstance(built.runner, ModelRunner):
        raise ConfigError(f"--draft-model {name} is computed on CPUs only: give --device cpu", field="--draft-model")
    spec = known_spec(directory)
    if spec.vocab_size != built.model.vocab_size:
        raise ConfigError(
            f"--draft-model {name} draws from {spec.vocab_size} tokens, and the model from {built.model.vocab_size}",
            field="--draft-model",
        )
    longest = min(built.model.max_model_len, spec.max_position_embeddings)
    block_size = config.cache.block_size
    pages = draft_pool(spec, config.model.dtype, block_size, config.schedule.draft_cache_bytes)
    is_packed = built.runner.has_packed_weights and spec.generic is None
    is_int8 = is_packed and is_drafted_in_int8(spec, config.model.dtype, layouts_in(directory))
    model = ModelConfig(
        model=name,
        dtype=config.model.dtype,
        weights="int8" if is_int8 else "model",
        max_model_len=longest,
        device=config.model.device,
    )
    weight_bytes = billed_weights(model, spec, directory, is_packed=is_packed, with_head=True)
    _check_room(name, weight_bytes)
    memory = PageMemory(pages.pages, pages.page_bytes, flag=CACHE_FLAG)
    try:
        runner = ModelRunner(
            directory,
            spec,
            memory,
            model,
            pool=grouped_pool(
                [torch.from_numpy(memory.regions[0])], pages.form, pages.shapes, getattr(torch, model.dtype)
            ),
            on=RunnerResources(built.runner),
            with_head=True,
        )
    except BaseException:
        memory.close()
        raise
    uses = (
        MemoryUse("draft pages", memory.layout.host_bytes, memory.held_bytes),
        MemoryUse("draft weights", weight_bytes, None),
    )
    return DraftEngine(runner, memory, block_size, longest, uses)


def _check_room(name: str, weight_bytes: int) -> None:
    """Raises ConfigError where the draft model's weights do not fit into the memory of this machine."""
    free_bytes = available_memory_bytes()
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"--draft-model {name} needs {weight_bytes} bytes for its weights, but this machine has {free_bytes} free",
            field="--draft-model",
        )
