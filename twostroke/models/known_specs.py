"""Specs of models that this machine has read before. No torch and no transformers here, which take seconds to load.

A spec is remembered for as long as it would be read from the same bytes by the same code.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from twostroke.config.model import AUTO
from twostroke.errors import ConfigError
from twostroke.json_values import from_json, to_json
from twostroke.models.catalog.places import cache_dir
from twostroke.models.spec import ModelSpec

log = logging.getLogger(__name__)

READ_FILES: Final = ("config.json", "generation_config.json")
"""The files of a model's directory that its spec is read from."""
READING_CODE: Final = ("registry.py", "spec.py", "families/*.py", "generic/*.py")


def known_spec(directory: Path, max_model_len: int | None = None, implementation: str = AUTO) -> ModelSpec:
    """Return what `registry.read_spec` returns, and raise what it raises."""
    memory = _memory_of(directory, max_model_len, implementation)
    try:
        return from_json(ModelSpec, memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError):
        from twostroke.models.registry import read_spec  # loads transformers

        spec = read_spec(directory, max_model_len, implementation)
        _remember(memory, spec)
        return spec


def _remember(memory: Path, spec: ModelSpec) -> None:
    """Nothing is lost where it cannot be written: the next start reads the files again."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, prefix=".spec-", delete=False) as file:
            file.write(to_json(spec))
        os.replace(file.name, memory)
    except OSError as error:
        log.warning("spec not remembered path=%s error=%s", memory, error)


def spec_key(directory: Path, max_model_len: int | None, implementation: str) -> str:
    """Return the digest of all that a spec is read from, the code that reads it included."""
    facts = f"{version('transformers')} {version('torch')} {max_model_len} {implementation}"
    key = hashlib.blake2b(facts.encode(), digest_size=16)
    here = Path(__file__).parent
    code = (path for pattern in READING_CODE for path in sorted(here.glob(pattern)))
    for path in (*code, *(directory / name for name in READ_FILES)):
        content = path.read_bytes() if path.exists() else b""
        key.update(f" {len(content)} ".encode() + content)
    return key.hexdigest()


def _memory_of(directory: Path, max_model_len: int | None, implementation: str) -> Path:
    return cache_dir() / "models" / "specs" / f"{spec_key(directory, max_model_len, implementation)}.json"
