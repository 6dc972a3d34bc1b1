"""The header of a safetensors file: names, types, shapes and places of its tensors. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twostroke.base.errors import ConfigError

LENGTH_BYTES: Final = 8
"""Bytes of the number at the start of a file, which is the length of the header."""
WHOLE: Final = "model.safetensors"
SHARD_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor, and where its bytes are."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in bytes from the start of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files of a directory's weights."""

    paths: tuple[Path, ...]
    shard_of: Mapping[str, str]
    """The file of each tensor, from the index; empty where there is no index."""

    def has(self, tensor: str, path: Path) -> bool:
        """Returns whether the tensor of this name is to be read from this file."""
        return self.shard_of.get(tensor, path.name) == path.name


def weight_files(directory: Path) -> WeightFiles:
    """Returns the files that an index names; else model.safetensors; else all of them.

    Other files are copies of the weights in another format, such as consolidated.safetensors. Raises ConfigError for an
    index that names anything but files in its own folder. It does the same where the folder has model.safetensors and
    an index of other files: then it is unclear which of the two is to be read.
    """
    whole, index = directory / WHOLE, directory / SHARD_INDEX
    if not index.is_file():
        paths = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
        return WeightFiles(tuple(paths), {})
    shards = _shards(index)
    named = sorted(set(shards.values()))
    for name in named:
        if not (directory / name).is_file():
            raise ConfigError(
                f"model directory {directory} has no {name}, which its {SHARD_INDEX} names", field="model"
            )
    if whole.is_file() and WHOLE not in named:
        raise ConfigError(
            f"model directory {directory} has {WHOLE} beside {SHARD_INDEX}, which does not name it: take away the one "
            "that is not meant",
            field="model",
        )
    return WeightFiles(tuple(directory / name for name in named), shards)


def _shards(index: Path) -> dict[str, str]:
    try:
        shards = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of weight files: {error!r}", field="model") from error
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{index} names {shard!r}, which is not a weight file beside it", field="model")
    return shards


def read_headers(directory: Path) -> dict[str, HeaderTensor]:
    """Returns all tensors of a directory's weights by name.

    Raises ConfigError for a damaged header. It does so too where several files have a tensor of the same name and no
    index names one of them.
    """
    files = weight_files(directory)
    found: dict[str, HeaderTensor] = {}
    for path in files.paths:
        for name, tensor in _header_of(path).items():
            if not files.has(name, path):
                continue
            if name in found:
                raise ConfigError(
                    f"{directory}: tensor {name} is in {found[name].path.name} and in {path.name}: take away the file "
                    "that is not meant",
                    field="model",
                )
            found[name] = tensor
    return found


def _header_of(path: Path) -> dict[str, HeaderTensor]:
    """Returns the tensors of one file. The library checks the header, but does not return the offsets of tensors."""
    from safetensors import SafetensorError, safe_open  # programs that read no file, as `make gpu`, do without it

    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}", field="model") from error
    header.pop("__metadata__", None)
    return {name: _tensor(path, facts, LENGTH_BYTES + length) for name, facts in header.items()}


def _tensor(path: Path, facts: Mapping[str, Any], begin: int) -> HeaderTensor:
    first, end = facts["data_offsets"]
    return HeaderTensor(path, facts["dtype"], tuple(facts["shape"]), begin + first, end - first)


def quantization_in(directory: Path) -> Mapping[str, Any] | None:
    """Returns config.json's options of quantised weights; None where it has none or cannot be read."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ConfigError(f"{directory / 'config.json'}: quantization_config is not an object", field="model")
    return found
