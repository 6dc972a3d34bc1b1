"""Checks whether a model may take the place of the one that a fleet serves: other weights, and nothing else.

Routers keep their tokenizer and workers their page size, so both must stay. No torch and no transformers here: what
needs them runs in a process of its own (twostroke/models/checks/preflight.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from twostroke.base.errors import ConfigError
from twostroke.base.tokenizer_file import is_of, tokenizer_field
from twostroke.config import PACED_PREFIX, ModelConfig
from twostroke.engine.backends.paced.runner import PacedSpec
from twostroke.models.catalog.places import locate
from twostroke.models.checks.preflight import check_model

IGNORED: Final = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of a config.json that say nothing of what is computed: pages have the fleet's --dtype."""
TOKENIZER: Final = "tokenizer.json"


def check_replacement(served: ModelConfig, now: str, wanted: str, fingerprints: Sequence[str] = ()) -> None:
    """Raises ConfigError saying what differs between the model that is served now and the wanted one.

    An empty `wanted` means the same model again, whose directory may have other weights by now. `fingerprints` are
    those of the workers that serve: routers have the tokenizer that most of them have loaded.
    """
    if not wanted or wanted == now:
        if not now.startswith(PACED_PREFIX):
            directory = _directory(now, served.dtype)
            _check_loaded_tokenizer(directory, fingerprints)
            check_model(directory, served)
        return
    if served.is_paced or wanted.startswith(PACED_PREFIX):
        _check_paced(now, wanted)
        return
    before, after = _known_directory(served, now), _directory(wanted, served.dtype)
    known, new = _config(before), _config(after)
    differing = sorted(key for key in known.keys() | new.keys() if known.get(key) != new.get(key))
    if differing:
        differences = "; ".join(f"{key} is {new.get(key)!r}, not {known.get(key)!r}" for key in differing[:3])
        raise ConfigError(
            f"{wanted} is another model than {now}: {differences}. Only weights can be reloaded: start another "
            "cluster for it",
            field="model",
        )
    if _read(before / TOKENIZER) != _read(after / TOKENIZER):
        raise ConfigError(
            f"{wanted} has another {TOKENIZER} than {now}, and routers keep theirs: only weights can be reloaded",
            field="model",
        )
    _check_loaded_tokenizer(after, fingerprints)
    check_model(after, served)


def _check_loaded_tokenizer(directory: Path, fingerprints: Sequence[str]) -> None:
    """Raises ConfigError where the directory has another tokenizer by now: routers would refuse such workers."""
    tokenizer = tokenizer_field(directory)
    having = sum(is_of(tokenizer, fingerprint) for fingerprint in fingerprints)
    if 2 * having < len(fingerprints):
        raise ConfigError(
            f"{directory} has another {TOKENIZER} than the workers have loaded, and routers keep theirs: only weights "
            "can be reloaded. Put the old one back, or start the fleet anew",
            field="model",
        )


def _check_paced(now: str, wanted: str) -> None:
    if not (now.startswith(PACED_PREFIX) and wanted.startswith(PACED_PREFIX)):
        raise ConfigError(f"{wanted} cannot take the place of {now}: one of them is a paced model", field="model")
    known, new = (PacedSpec.parse(each.removeprefix(PACED_PREFIX)) for each in (now, wanted))
    if dataclasses.replace(new, weights=known.weights) != known:
        raise ConfigError(f"{wanted} is another model than {now}: only weights=N may differ", field="model")


def _known_directory(served: ModelConfig, now: str) -> Path:
    """Returns the directory of the model served now, or of the one before all reloads where the former is gone."""
    try:
        return _directory(now, served.dtype)
    except ConfigError:
        return _directory(served.model, served.dtype)


def _directory(model: str, dtype: str) -> Path:
    directory = locate(model, dtype)
    if directory is None:
        raise ConfigError(f"model {model!r} is not on this machine; run: twostroke model pull {model}", field="model")
    return directory


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        read = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} holds no object", field="model")
    return {key: value for key, value in read.items() if key not in IGNORED}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
