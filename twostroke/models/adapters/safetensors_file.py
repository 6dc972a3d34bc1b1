"""Tensors of a safetensors file as numpy arrays, each checked before it is used. Nothing of the file is executed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from twostroke.errors import ConfigError

MOST_HEADER_BYTES: Final = 16 << 20
"""Bytes of a header. An adapter has some thousand tensors, each described in a hundred bytes."""
LENGTH_BYTES: Final = 8
"""The header's length, little-endian, begins the file."""

DTYPES: Final[Mapping[str, npt.DTypeLike]] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    dtype: str
    """A key of DTYPES."""
    shape: tuple[int, ...]
    raw: memoryview
    """Its bytes in the file."""

    def floats(self) -> Floats:
        """Return its numbers as float32 of its shape."""
        numbers = np.frombuffer(self.raw, DTYPES[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":
            return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return numbers.astype(np.float32)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a file by name. Raises ConfigError, in one line, for a file that is not as it should be."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="adapter") from error
    header, begin = _header(path, content)
    tensors, ends = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end, tensor = _tensor(path, name, entry, content[begin:])
        tensors[name] = tensor
        ends.append((first, end))
    _check_layout(path, ends, len(content) - begin)
    return tensors


def _header(path: Path, content: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header, and where the tensors begin."""
    if len(content) < LENGTH_BYTES:
        raise _broken(path, f"it has {len(content)} bytes, fewer than the length of a header")
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    if length > min(MOST_HEADER_BYTES, len(content) - LENGTH_BYTES):
        raise _broken(path, f"its header would have {length} bytes")
    begin = LENGTH_BYTES + length
    try:
        header = json.loads(bytes(content[LENGTH_BYTES:begin]))
    except (ValueError, RecursionError) as error:
        raise _broken(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    return header, begin


def _tensor(path: Path, name: str, entry: Any, data: memoryview) -> tuple[int, int, StoredTensor]:
    """Return where a tensor begins and ends, and the tensor."""
    shown = repr(name[:120])
    if not isinstance(entry, dict):
        raise _broken(path, f"tensor {shown} has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _broken(path, f"tensor {shown} has dtype {str(dtype)[:20]}; {', '.join(DTYPES)} are read")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _broken(path, f"tensor {shown} has shape {str(shape)[:60]} and data_offsets {str(offsets)[:60]}")
    first, end = offsets
    size = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if not first <= end <= len(data) or end - first != size:
        raise _broken(path, f"tensor {shown} needs {size} bytes, and lies at {first} to {end} of {len(data)}")
    return first, end, StoredTensor(dtype, tuple(shape), data[first:end])


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_layout(path: Path, ends: list[tuple[int, int]], size: int) -> None:
    """Raise ConfigError unless the tensors lie end to end and fill the file: no byte has two meanings, or none."""
    at = 0
    for first, end in sorted(ends):
        if first != at:
            raise _broken(path, f"its tensors overlap or leave a gap at byte {min(first, at)}")
        at = end
    if at != size:
        raise _broken(path, f"its tensors end at byte {at} of {size}")


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is broken: {why}", field="adapter")
