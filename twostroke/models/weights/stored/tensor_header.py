"""The header of a safetensors file: names, types, shapes and places of its tensors, all checked. No torch here.

The format: huggingface.co/docs/safetensors, 8 bytes of length, that much JSON, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twostroke.errors import ConfigError

MOST_HEADER_BYTES: Final = 100_000_000
"""What the format itself allows."""
TYPE_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor, and where its bytes are."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """In bytes from the beginning of the file."""
    size_bytes: int


def read_headers(directory: Path) -> dict[str, HeaderTensor]:
    """Return all tensors of a directory's safetensors files by name. Raises ConfigError for a damaged header."""
    found: dict[str, HeaderTensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(_header_of(path))
    return found


def _header_of(path: Path) -> dict[str, HeaderTensor]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
                raise _damaged(path, f"a header of {length} bytes does not fit into its {size}")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, facts, 8 + length) for name, facts in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size_bytes)):
        if tensor.start < end:
            raise _damaged(path, f"tensor {name} overlaps the one before it")
        end = tensor.start + tensor.size_bytes
        if end > size:
            raise _damaged(path, f"tensor {name} ends at {end}, behind the file's {size} bytes")
    return tensors


def _tensor(path: Path, name: str, facts: Any, begin: int) -> HeaderTensor:
    try:
        dtype, shape, (first, end) = str(facts["dtype"]), tuple(facts["shape"]), facts["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"tensor {name} has no type, shape and place") from error
    numbers = (*shape, first, end)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or dtype not in TYPE_BYTES:
        raise _damaged(path, f"tensor {name} has type {dtype}, shape {shape} and place {first}..{end}")
    size_bytes = math.prod(shape) * TYPE_BYTES[dtype]
    if end - first != size_bytes:
        raise _damaged(path, f"tensor {name} of type {dtype} and shape {shape} takes {end - first} bytes")
    return HeaderTensor(path, dtype, shape, begin + first, size_bytes)


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {what}", field="model")


def quantization_in(directory: Path) -> Mapping[str, Any] | None:
    """Return what config.json says of quantised weights; None where it says nothing or cannot be read."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ConfigError(f"{directory / 'config.json'}: quantization_config is no object", field="model")
    return found
