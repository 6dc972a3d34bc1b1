"""Keeps specs of models that this machine has read before. No torch and no transformers here, which take seconds to
load.

A kept spec is used as long as the same code would read it from the same bytes.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from twostroke.base.cache_key import cache_key, content_digest
from twostroke.base.errors import ConfigError
from twostroke.base.json_values import from_json, to_json
from twostroke.config.model import AUTO
from twostroke.models.catalog.places import cache_dir
from twostroke.models.end_tokens import READ_FILES, gguf_end_facts
from twostroke.models.spec import ModelSpec
from twostroke.security.trusted_paths import check_cache, make_folder

log = logging.getLogger(__name__)


def known_spec(directory: Path, max_model_len: int | None = None, implementation: str = AUTO) -> ModelSpec:
    """Returns what `registry.read_spec` returns, and raises what it raises."""
    memory = _memory_of(directory, max_model_len, implementation)
    try:
        check_cache(memory)
        return from_json(ModelSpec, memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError):
        from twostroke.models.registry import read_spec  # loads transformers

        spec = read_spec(directory, max_model_len, implementation)
        _remember(memory, spec)
        return spec


def _remember(memory: Path, spec: ModelSpec) -> None:
    """Writes a spec for later starts. If it cannot be written, the next start reads the files again."""
    try:
        make_folder(memory.parent)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, prefix=".spec-", delete=False) as file:
            file.write(to_json(spec))
        os.replace(file.name, memory)
    except OSError as error:
        log.warning("spec not remembered path=%s error=%s", memory, error)


def spec_key(directory: Path, max_model_len: int | None, implementation: str) -> str:
    """Returns the digest of all that a spec is read from, including the code that reads it."""
    files = content_digest((name, directory / name) for name in READ_FILES)
    return cache_key(
        "spec",
        files=files,
        gguf_end_tokens=gguf_end_facts(directory),
        max_model_len=max_model_len,
        implementation=implementation,
    )


def _memory_of(directory: Path, max_model_len: int | None, implementation: str) -> Path:
    return cache_dir() / "models" / "specs" / f"{spec_key(directory, max_model_len, implementation)}.json"
