"""The places of a model's files on this machine: names of the catalogue, local directories, hub ids. No torch here."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from twostroke.base.cache_key import cache_key, content_digest
from twostroke.base.errors import ConfigError
from twostroke.models.catalog.recommended import Recommended, read_recommended
from twostroke.models.catalog.wheel_models import CATALOG
from twostroke.models.file_versions import FileVersion
from twostroke.models.weights.stored.model_files import GGUF_SUFFIX, gguf_in
from twostroke.models.weights.stored.tensor_header import weight_files
from twostroke.security.trusted_paths import UntrustedPath, check_cache

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which a model directory needs one. Where that is not tokenizer.json, transformers makes it (see
`twostroke.models.catalog.fetch`)."""

FILES_BESIDE: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""Files that are copied from the folder of a GGUF file, if its config and tokenizer are in that folder."""

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx"})
"""Suffixes of weight files. Their content has no influence on a tokenizer."""

TEMPLATES: Final = "additional_chat_templates"
"""The only folder in a model directory that a tokenizer is read from."""

AS_STORED: Final = ":gguf"
"""Suffix of a catalogue name: the model's GGUF file is used as stored, not dequantised."""

MARKER_SUFFIX: Final = ".snapshot"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def cache_dir() -> Path:
    """Returns the folder of all that we download or build once for all runs of this user."""
    if chosen := os.environ.get("TWOSTROKE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "twostroke"


def locate(model: str, dtype: str) -> Path | None:
    """Returns a directory that is ready to load, or None if the model must be fetched first.

    Raises ConfigError for a local directory that lacks a file, and for what is not a model's name at all.
    """
    if (target := made_dir(model, dtype)) is not None:
        return _existing(target)
    if (directory := local_dir(model)) is not None:
        check_files(directory)
        return _existing(ready_dir(directory))
    snapshot = hub_snapshot(model)
    return None if snapshot is None else _existing(ready_dir(snapshot))


def ready_dir(directory: Path) -> Path:
    """Returns the directory that is loaded for a directory of model files: itself, or its twin with a
    tokenizer.json."""
    return directory if (directory / "tokenizer.json").exists() else converted_dir(directory)


def made_dir(model: str, dtype: str) -> Path | None:
    """Returns the directory that is made from a GGUF file of the catalogue, or from one that `model` names; None for
    other models."""
    if model in CATALOG:
        return catalog_dir(model, dtype)
    if model.endswith(AS_STORED) and (name := model.removesuffix(AS_STORED)) in CATALOG:
        return _dir_of_catalogue(name, "gguf")
    file = gguf_file(model)
    return None if file is None else _dir_of_file(file)


def gguf_file(model: str) -> Path | None:
    """Returns the GGUF file that `model` names; None where it names something else. Raises ConfigError where there is
    no such file."""
    path = Path(model).expanduser()
    if path.suffix != GGUF_SUFFIX or path.is_dir():
        return None
    if not path.is_file():
        raise ConfigError(f"--model {model}: no such file", field="model")
    return path.resolve()


def _dir_of_file(file: Path) -> Path:
    """Returns the directory that is made from a GGUF file. It is another one once the file, or a config or tokenizer
    beside it, has changed."""
    templates = sorted(f"{TEMPLATES}/{path.name}" for path in (file.parent / TEMPLATES).glob("*"))
    beside = content_digest((name, file.parent / name) for name in (*FILES_BESIDE, *templates))
    key = cache_key("model of a GGUF file", file=FileVersion.of(file), beside=beside)
    return cache_dir() / "models" / "files" / f"{file.stem}-{key}"


def local_dir(model: str) -> Path | None:
    """Returns the directory that `model` names, or None where it is a hub id. Raises ConfigError where it
    is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ConfigError(
            f"--model {model!r} is not a directory here, not a hub id (owner/name) and not one of {sorted(CATALOG)}",
            field="model",
        )
    return None


def check_files(directory: Path) -> None:
    """Raises ConfigError naming a file that a model directory lacks, or a file of unknown purpose."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model directory {directory} has no config.json", field="model")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model directory {directory} has no tokenizer.json", field="model")
    if not any(directory.glob("*.safetensors")) and gguf_in(directory) is None:
        raise ConfigError(
            f"model directory {directory} has no *.safetensors or *.gguf weights (other formats are not loaded)",
            field="model",
        )
    weight_files(directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model that `serve` can load without fetching anything."""

    name: str
    """The model's name as --model takes it."""
    dtype: str
    """The type of the weights in the files."""
    size_bytes: int
    path: str


def cached_models() -> list[CachedModel]:
    """Returns the fetched models of the catalogue and of the hub, and local directories with a converted tokenizer."""
    models = cache_dir() / "models"
    found = [
        (name, ready)
        for name, source in CATALOG.items()
        for ready in sorted((models / source.folder).glob("[!.]*"))  # .fetch-...: of a fetch that is under way
    ]
    names = (unquote(marker.stem) for marker in sorted((models / "hub").glob(f"*{MARKER_SUFFIX}")))
    found += [(name, ready_dir(snapshot)) for name in names if (snapshot := hub_snapshot(name)) is not None]
    of_the_hub = {path for _, path in found}
    twins = {path: _origin(path) for path in sorted((models / "converted").glob("[!.]*")) if path not in of_the_hub}
    found += [(str(origin), path) for path, origin in twins.items() if origin and path == converted_dir(origin)]
    return [
        CachedModel(name=name, dtype=_stored_dtype(path), size_bytes=_size_bytes(path), path=str(path))
        for name, path in found
        if path.is_dir()
    ]


def _origin(converted: Path) -> Path | None:
    """Returns the directory with the original files of the links there; None where it is gone."""
    links = (file.readlink().parent for file in sorted(converted.iterdir()) if file.is_symlink())
    return next((directory for directory in links if directory.is_dir()), None)


def _stored_dtype(directory: Path) -> str:
    """Returns the type that config.json names; "unknown" if it names none."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "unknown"
    return str(config.get("dtype") or config.get("torch_dtype") or "unknown")


def _size_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def recommended_sampling(model_dir: str) -> Recommended:
    """Returns the sampling for chats with the model in this directory. It is empty where there is none, as for a paced
    model.
    """
    if not model_dir:
        return Recommended()
    folder = Path(model_dir).parent.name
    usual = next((source.recommended for source in CATALOG.values() if source.folder == folder), Recommended())
    return read_recommended(Path(model_dir), usual)


def catalog_dir(model: str, dtype: str) -> Path:
    """Returns the place of a model of the catalogue with weights dequantised into `dtype`."""
    return _dir_of_catalogue(model, dtype)


def _dir_of_catalogue(model: str, form: str) -> Path:
    source = CATALOG[model]
    key = cache_key("model of a GGUF file", sha256=source.sha256, form=form)
    return cache_dir() / "models" / source.folder / f"{form}-{key}"


def converted_dir(directory: Path) -> Path:
    """Returns the place of the twin, with a tokenizer.json, of a local directory that lacks one.

    The twin has links to all files. Another twin is made when the set of files changes, or when a file changes from
    which a tokenizer may be made.
    """
    entries = sorted(directory.iterdir())
    read = [path for path in entries if path.suffix not in WEIGHT_SUFFIXES]
    templates = sorted((directory / TEMPLATES).glob("*"))
    key = cache_key(
        "tokenizer twin",
        directory=str(directory.resolve()),
        names=[path.name for path in entries],
        files=content_digest((str(path.relative_to(directory)), path) for path in [*read, *templates]),
    )
    return cache_dir() / "models" / "converted" / f"{directory.name}-{key}"


def hub_marker(model: str) -> Path:
    """Returns a file that holds the path of a completely downloaded snapshot."""
    return cache_dir() / "models" / "hub" / f"{quote(model, safe='')}{MARKER_SUFFIX}"


def hub_snapshot(model: str) -> Path | None:
    """Returns the snapshot of a hub id that was completely downloaded; None without one."""
    marker = hub_marker(model)
    if not marker.exists() or _existing(marker.parent) is None:
        return None
    return _existing(Path(marker.read_text(encoding="utf-8")))


def _existing(directory: Path) -> Path | None:
    """Returns the directory, or None where it does not exist. Raises ConfigError where it is in the cache and other
    users may have written it."""
    if not directory.is_dir():
        return None
    if directory.is_relative_to(cache_dir()):
        try:
            check_cache(directory)
        except UntrustedPath as error:
            raise ConfigError(f"the cache of models is not trusted: {error.strerror}", field="model") from error
    return directory
