"""The places of a model's files on this machine: names of the catalogue, local directories, hub ids. No torch here."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from twostroke.errors import ConfigError
from twostroke.models.catalog.recommended import Recommended, read_recommended
from twostroke.models.catalog.wheel_models import CATALOG
from twostroke.models.weights.stored.model_files import GGUF_SUFFIX, gguf_in

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Any one of them; from the others transformers makes a tokenizer.json (see models.fetch)."""

SHARD_INDEX: Final = "model.safetensors.index.json"

AS_STORED: Final = ":gguf"
"""Behind a name of the catalogue: its file is used as it is, not dequantised."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def cache_dir() -> Path:
    """Everything that we download or build once for all runs of this user."""
    if chosen := os.environ.get("TWOSTROKE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "twostroke"


def locate(model: str, dtype: str) -> Path | None:
    """A directory that is ready to load, or None if the model must be fetched first.

    Raises ConfigError for a local directory that misses a file, and for what is no model's name at all.
    """
    if (target := made_dir(model, dtype)) is not None:
        return _existing(target)
    if (directory := local_dir(model)) is not None:
        check_files(directory)
        return directory if (directory / "tokenizer.json").exists() else _existing(converted_dir(directory))
    marker = hub_marker(model)
    if not marker.exists():
        return None
    return _existing(Path(marker.read_text(encoding="utf-8")))


def made_dir(model: str, dtype: str) -> Path | None:
    """Return the directory that is made of a GGUF file: of the catalogue's, or of one that `model` names."""
    if model in CATALOG:
        return catalog_dir(model, dtype)
    if model.endswith(AS_STORED) and (name := model.removesuffix(AS_STORED)) in CATALOG:
        return cache_dir() / "models" / CATALOG[name].folder / "gguf"
    file = gguf_file(model)
    return None if file is None else _dir_of_file(file)


def gguf_file(model: str) -> Path | None:
    """Return the GGUF file that `model` names. Raises ConfigError where it is not there."""
    path = Path(model).expanduser()
    if path.suffix != GGUF_SUFFIX or path.is_dir():
        return None
    if not path.is_file():
        raise ConfigError(f"--model {model}: no such file", field="model")
    return path.resolve()


def _dir_of_file(file: Path) -> Path:
    """A file that was changed gets a new directory."""
    status = file.stat()
    facts = f"{file} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    key = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    return cache_dir() / "models" / "files" / f"{file.stem}-{key}"


def local_dir(model: str) -> Path | None:
    """The directory that `model` names, or None where it is a hub id. Raises ConfigError where it is neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ConfigError(
            f"--model {model!r} is no directory here, no hub id (owner/name) and none of {sorted(CATALOG)}",
            field="model",
        )
    return None


def check_files(directory: Path) -> None:
    """Raises ConfigError naming the file that a model directory misses."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model directory {directory} has no config.json", field="model")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model directory {directory} has no tokenizer.json", field="model")
    if not any(directory.glob("*.safetensors")) and gguf_in(directory) is None:
        raise ConfigError(
            f"model directory {directory} has no *.safetensors or *.gguf weights (other formats are not loaded)",
            field="model",
        )
    for shard in _shards(directory):
        if not (directory / shard).is_file():
            raise ConfigError(
                f"model directory {directory} has no {shard}, which its {SHARD_INDEX} names", field="model"
            )


def _shards(directory: Path) -> list[str]:
    """The weight files that the index of a sharded model names."""
    index = directory / SHARD_INDEX
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of weight files: {error!r}", field="model") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{index} names {shard!r}, which is no weight file beside it", field="model")
    return shards


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
    """Models of the catalogue and of the hub that were fetched, and local directories whose tokenizer was converted."""
    models = cache_dir() / "models"
    found = [
        (name, ready)
        for name, source in CATALOG.items()
        for ready in sorted((models / source.folder).glob("[!.]*"))  # .fetch-...: of a fetch that is under way
    ]
    for marker in sorted((models / "hub").glob("*.path")):
        found.append((unquote(marker.stem), Path(marker.read_text(encoding="utf-8"))))
    of_the_hub = {path for _, path in found}
    converted = (path for path in sorted((models / "converted").glob("[!.]*")) if path not in of_the_hub)
    found += [(_origin(path), path) for path in converted]
    return [
        CachedModel(name=name, dtype=_stored_dtype(path), size_bytes=_size_bytes(path), path=str(path))
        for name, path in found
        if path.is_dir()
    ]


def _origin(converted: Path) -> str:
    """Return the directory whose files are linked there."""
    links = (file.resolve().parent for file in sorted(converted.glob("*.safetensors")))
    return str(next(links, converted))


def _stored_dtype(directory: Path) -> str:
    """Return the type that config.json names; "unknown" if it names none."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "unknown"
    return str(config.get("dtype") or config.get("torch_dtype") or "unknown")


def _size_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def recommended_sampling(model_dir: str) -> Recommended:
    """For chats with the model in this directory; nothing where there is none, as for a paced model."""
    if not model_dir:
        return Recommended()
    folder = Path(model_dir).parent.name
    usual = next((source.recommended for source in CATALOG.values() if source.folder == folder), Recommended())
    return read_recommended(Path(model_dir), usual)


def catalog_dir(model: str, dtype: str) -> Path:
    return cache_dir() / "models" / CATALOG[model].folder / dtype


def converted_dir(directory: Path) -> Path:
    """Return the place where a local directory without tokenizer.json gets its twin that has one."""
    key = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=16).hexdigest()
    return cache_dir() / "models" / "converted" / f"{directory.name}-{key}"


def hub_marker(model: str) -> Path:
    """A file that holds the path of a completely downloaded snapshot."""
    return cache_dir() / "models" / "hub" / f"{quote(model, safe='')}.path"


def _existing(directory: Path) -> Path | None:
    return directory if directory.is_dir() else None
