"""Reads the header of a GGUF file: its facts and the places of its tensors. No torch here.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from twostroke.base.errors import ConfigError
from twostroke.kernels.layout import Layout
from twostroke.models.weights.stored.gguf_names import ARCHITECTURES, GgufPlace


@dataclass(frozen=True, slots=True)
class TensorType:
    """One way in which GGUF stores numbers."""

    layout: Layout | None = None
    """None for plain numbers."""
    numbers: tuple[int, ...] = ()
    """The offsets of a block's float16 scales and mins, in bytes."""


def _coded(*numbers: int, **layout: Any) -> TensorType:
    return TensorType(Layout(**layout), numbers)


TYPES: Final = {
    "F32": TensorType(),
    "F16": TensorType(),
    "BF16": TensorType(),
    "Q4_0": _coded(0, bits=4, group=32, scales="float16", offset=8),
    "Q4_1": _coded(0, 2, bits=4, group=32, scales="float16", mins="float16"),
    "Q5_0": _coded(0, bits=5, group=32, scales="float16", offset=16),
    "Q5_1": _coded(0, 2, bits=5, group=32, scales="float16", mins="float16"),
    "Q8_0": _coded(0, bits=8, group=32, scales="float16"),
    "Q4_K": _coded(0, 2, bits=4, group=32, scales="uint8", mins="uint8"),
    "Q5_K": _coded(0, 2, bits=5, group=32, scales="uint8", mins="uint8"),
    "Q6_K": _coded(208, bits=6, group=16, scales="int8", offset=32),
    "MXFP4": _coded(bits=4, group=32, scales="exponent", is_fp4=True),
}
"""The types that are served, by their names in the `gguf` package."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of one tensor in its file."""

    name: str
    shape: tuple[int, ...]
    """Rows first: a matrix is [outputs, inputs]."""
    kind: str
    """A key of TYPES."""
    block_bytes: int
    """Bytes of one block, the numbers that are stored together."""
    start: int
    """Offset in bytes from the start of the file."""
    size_bytes: int

    @property
    def layout(self) -> Layout | None:
        """The layout of its codes; None for plain numbers."""
        return TYPES[self.kind].layout

    def part(self, index: int) -> GgufTensor:
        """Returns one of the tensors that this one holds along its first dimension."""
        size = self.size_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + index * size, size_bytes=size)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file."""

    path: Path
    facts: dict[str, Any]
    """Numbers and strings by name. Of an array, which may be long, it has only the length."""
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.facts.get("general.architecture", ""))

    def find(self, place: GgufPlace) -> GgufTensor | None:
        """Returns the tensor at a place; None where there is none."""
        tensor = self.tensors.get(place.name)
        if tensor is None or place.expert is None:
            return tensor
        return tensor.part(place.expert) if len(tensor.shape) > 1 and place.expert < tensor.shape[0] else None


def read_gguf(path: Path) -> GgufFile:
    """Returns the header of a file. Raises ConfigError, in one line, for a damaged file and for tensors of types that
    are not served."""
    from twostroke.models.weights.stored.gguf_header import NATIVE, HeaderReader, block_bytes

    try:
        with np.errstate(all="raise"):  # raises for numbers that are too large for the library's arithmetic
            header = HeaderReader(path)
        facts = header.facts()
    except (ArithmeticError, LookupError, OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path} cannot be read as GGUF: {shown(str(error))}", field="model") from error
    if header.byte_order != NATIVE:
        raise ConfigError(f"{path} cannot be read as GGUF: its numbers are big-endian", field="model")
    tensors = [_placed(path, tensor, block_bytes(tensor)) for tensor in header.tensors]
    for before, tensor in pairwise(sorted(tensors, key=lambda tensor: tensor.start)):
        if tensor.start < before.start + before.size_bytes:
            raise ConfigError(f"{path}: tensor {shown(tensor.name)} overlaps the one before it", field="model")
    return GgufFile(path, facts, {tensor.name: tensor for tensor in tensors})


def check_architecture(file: GgufFile) -> None:
    """Raises ConfigError for a file of an architecture that is not served."""
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{file.path}: architecture {file.architecture!r} is not served from GGUF; served: {known}", field="model"
        )


def _placed(path: Path, tensor: Any, block_bytes: int) -> GgufTensor:
    """Returns one tensor of the library's header. The library has checked that the file has the tensor's bytes."""
    kind, shape = tensor.tensor_type.name, tuple(tensor.shape[::-1].tolist())
    if kind not in TYPES or not all(shape):
        known = ", ".join(TYPES)
        raise ConfigError(
            f"{path}: tensor {shown(tensor.name)} has type {kind} and shape {shape}; {known} are served", field="model"
        )
    return GgufTensor(tensor.name, shape, kind, block_bytes, tensor.data_offset, tensor.n_bytes)


def shown(name: str) -> str:
    """Returns a name from a file for use in one line: escaped where it cannot be printed, and at most 120 characters of
    it."""
    return name if name.isprintable() and len(name) <= 120 else repr(name[:120])
