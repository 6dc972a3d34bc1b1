"""The header of a GGUF file: its facts and where its tensors lie. Every length and place is checked. No torch here.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from twostroke.errors import ConfigError
from twostroke.kernels.layout import Layout
from twostroke.models.weights.stored.gguf_names import ARCHITECTURES, GgufPlace

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MOST_TENSORS: Final = 100_000
MOST_FACTS: Final = 10_000
MOST_NAME_BYTES: Final = 64 << 10
MOST_DIMENSIONS: Final = 4
"""Far above what any model has: a file that says more is damaged."""
USUAL_ALIGNMENT: Final = 32

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
"""Types of facts."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """One way in which GGUF stores numbers."""

    name: str
    block: int
    """Numbers that are stored together."""
    block_bytes: int
    layout: Layout | None = None
    """None for plain numbers."""
    numbers: tuple[int, ...] = ()
    """The places of a block's float16 scales and mins."""


def _coded(name: str, block: int, block_bytes: int, *numbers: int, **layout: Any) -> TensorType:
    return TensorType(name, block, block_bytes, Layout(**layout), numbers)


TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: _coded("Q4_0", 32, 18, 0, bits=4, group=32, scales="float16", offset=8),
    3: _coded("Q4_1", 32, 20, 0, 2, bits=4, group=32, scales="float16", mins="float16"),
    6: _coded("Q5_0", 32, 22, 0, bits=5, group=32, scales="float16", offset=16),
    7: _coded("Q5_1", 32, 24, 0, 2, bits=5, group=32, scales="float16", mins="float16"),
    8: _coded("Q8_0", 32, 34, 0, bits=8, group=32, scales="float16"),
    12: _coded("Q4_K", 256, 144, 0, 2, bits=4, group=32, scales="uint8", mins="uint8"),
    13: _coded("Q5_K", 256, 176, 0, 2, bits=5, group=32, scales="uint8", mins="uint8"),
    14: _coded("Q6_K", 256, 210, 208, bits=6, group=16, scales="int8", offset=32),
    39: _coded("MXFP4", 32, 17, bits=4, group=32, scales="exponent", is_fp4=True),
}
"""The types that are served, by their numbers in the file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of one tensor in its file."""

    name: str
    shape: tuple[int, ...]
    """Rows first: a matrix is [outputs, inputs]."""
    kind: TensorType
    start: int
    """In bytes from the beginning of the file."""
    size_bytes: int

    def part(self, index: int) -> GgufTensor:
        """Return one of the tensors that this one holds along its first dimension."""
        size = self.size_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + index * size, size_bytes=size)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file says of itself."""

    path: Path
    facts: dict[str, Any]
    """Numbers and strings; arrays, which may be long, only by their length."""
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.facts.get("general.architecture", ""))

    def find(self, place: GgufPlace) -> GgufTensor | None:
        """Return the tensor at a place; None where there is none."""
        tensor = self.tensors.get(place.name)
        if tensor is None or place.expert is None:
            return tensor
        return tensor.part(place.expert) if len(tensor.shape) > 1 and place.expert < tensor.shape[0] else None


def read_gguf(path: Path) -> GgufFile:
    """Raises ConfigError, one line that says what is wrong, for a damaged file and for tensors of other types."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            return _Reader(path, content).read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error


def check_architecture(file: GgufFile) -> None:
    """Raises ConfigError for a file of an architecture that is not served."""
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{file.path}: architecture {file.architecture!r} is not served from GGUF; served: {known}", field="model"
        )


class _Reader:
    """Walks a header from its first byte to its last."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = 0

    def read(self) -> GgufFile:
        if self._content[:4] != MAGIC:
            raise self._damaged("it does not begin with GGUF")
        self._at = 4
        version, tensor_count, fact_count = self._number("I"), self._number("Q"), self._number("Q")
        if version not in VERSIONS:
            raise self._damaged(f"version {version} is none of {VERSIONS}")
        if tensor_count > MOST_TENSORS or fact_count > MOST_FACTS:
            raise self._damaged(f"{tensor_count} tensors and {fact_count} facts are more than a model has")
        facts = dict(self._fact() for _ in range(fact_count))
        if len(facts) != fact_count:
            raise self._damaged("a fact is there twice")
        alignment = facts.get("general.alignment", USUAL_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, which is no power of two")
        rows = [self._tensor() for _ in range(tensor_count)]
        begin = -(-self._at // alignment) * alignment
        tensors = {row[0]: self._placed(*row, begin, alignment) for row in rows}
        if len(tensors) != len(rows):
            raise self._damaged("a tensor is there twice")
        self._check_places(list(tensors.values()))
        return GgufFile(self._path, facts, tensors)

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path} is not a GGUF file that can be served: {what}", field="model")

    def _take(self, count: int) -> int:
        """Return the place of the next so many bytes, and go on behind them."""
        at, self._at = self._at, self._at + count
        if self._at > len(self._content):
            raise self._damaged("it ends in the middle of its header")
        return at

    def _number(self, kind: str) -> int:
        number: int = struct.unpack_from(f"<{kind}", self._content, self._take(struct.calcsize(f"<{kind}")))[0]
        return number

    def _string(self, most: int | None = None) -> str:
        size = self._number("Q")
        if most is not None and size > most:
            raise self._damaged(f"a name has {size} bytes")
        at = self._take(size)
        return self._content[at : at + size].decode(errors="replace")

    def _fact(self) -> tuple[str, Any]:
        key = self._string(MOST_NAME_BYTES)
        return key, self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"a fact has the unknown type {kind}")
        of, count = self._number("I"), self._number("Q")
        if of in _SCALARS:
            self._take(struct.calcsize(f"<{_SCALARS[of]}") * count)
        elif of == _STRING:
            self._skip_strings(count)
        else:
            raise self._damaged(f"an array has the unknown type {of}")
        return count

    def _skip_strings(self, count: int) -> None:
        content, at, end = self._content, self._at, len(self._content)
        for _ in range(count):
            if at + 8 > end:
                raise self._damaged("it ends in the middle of its header")
            at += 8 + int.from_bytes(content[at : at + 8], "little")
        self._at = at
        self._take(0)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(MOST_NAME_BYTES), self._number("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise self._damaged(f"tensor {_shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, tuple(reversed(shape)), self._number("I"), self._number("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, begin: int, alignment: int
    ) -> GgufTensor:
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TYPES.values())
            raise self._damaged(f"tensor {_shown(name)} has type {number}, which is none of {known}")
        if any(size == 0 or size > 1 << 40 for size in shape) or shape[-1] % kind.block:
            raise self._damaged(f"tensor {_shown(name)} of type {kind.name} has shape {shape}")
        size_bytes = math.prod(shape) // kind.block * kind.block_bytes
        if offset % alignment or begin + offset + size_bytes > len(self._content):
            raise self._damaged(f"tensor {_shown(name)} does not lie in the file: {size_bytes} bytes at {offset}")
        return GgufTensor(name, shape, kind, begin + offset, size_bytes)

    def _check_places(self, tensors: list[GgufTensor]) -> None:
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise self._damaged(f"tensor {_shown(tensor.name)} overlaps the one before it")
            end = tensor.start + tensor.size_bytes


def _shown(name: str) -> str:
    """Return a name out of a file as part of one line: escaped where it cannot be printed, and not all of 64 KiB."""
    return name if name.isprintable() and len(name) <= 120 else repr(name[:120])
