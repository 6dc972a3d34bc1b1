"""Tensors of a GGUF file under the model's own names, each in the layout in which the file has it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import torch

from twostroke.base.errors import ConfigError
from twostroke.kernels.products.stored import Matrix, StoredMatrix, StoredNumbers
from twostroke.models.weights.stored.gguf_file import GgufFile, GgufTensor, check_architecture, read_gguf
from twostroke.models.weights.stored.gguf_names import gguf_place, has_one, is_paired

PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors(ExitStack):
    """Reads the tensors of one GGUF file. Raises ConfigError for what the file lacks, or has in another shape than the
    config says.
    """

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device | None = None, *, keeps_codes: bool = False
    ) -> None:
        super().__init__()
        self._file: GgufFile = read_gguf(path)
        check_architecture(self._file)
        self._dtype = dtype
        self._device = device
        self._keeps_codes = keeps_codes
        with path.open("rb") as opened:
            self._content = self.enter_context(_Mapped(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor of this name as plain numbers, on the device and in the dtype asked for."""
        tensor = self._tensor(name, shape)
        if tensor.layout is None:
            return self._plain(name, tensor).to(self._device, self._dtype, copy=True).view(shape)
        return self._stored(name, tensor).dense().to(self._device, self._dtype)

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Returns a matrix in the file's quantisation, or as plain numbers without `keeps_codes`."""
        tensor = self._tensor(name, (rows, inputs))
        if not self._keeps_codes or tensor.layout is None:
            return self.take(name, rows, inputs)
        return self._stored(name, tensor)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._file.find(gguf_place(self._file.architecture, name))
        if tensor is None:
            place = gguf_place(self._file.architecture, name)
            of_expert = "" if place.expert is None else f" with an expert {place.expert}"
            raise ConfigError(f"{self._file.path} has no tensor {place.name}{of_expert}", field="model")
        if shape not in {tensor.shape, (1, *tensor.shape)}:  # a single row may be stored as a vector
            raise ConfigError(
                f"{self._file.path}: tensor {tensor.name} has shape {tensor.shape}, the config says {shape}",
                field="model",
            )
        return tensor

    def _bytes(self, tensor: GgufTensor) -> np.ndarray:
        return np.frombuffer(self._content.region, np.uint8, tensor.size_bytes, tensor.start)

    def _plain(self, name: str, tensor: GgufTensor) -> torch.Tensor:
        numbers = torch.from_numpy(self._bytes(tensor).copy()).view(PLAIN[tensor.kind]).view(tensor.shape)
        if has_one(self._file.architecture, name):
            numbers = numbers.float() - 1
        return self._with_halves_of_heads(name, numbers)

    def _stored(self, name: str, tensor: GgufTensor) -> StoredMatrix:
        layout = tensor.layout
        assert layout is not None, "plain numbers are read at once"
        rows, inputs = tensor.shape

        def read() -> StoredNumbers:
            blocks = torch.from_numpy(self._bytes(tensor).copy()).view(rows, -1, tensor.block_bytes)
            blocks = self._with_halves_of_heads(name, blocks)
            numbers = READERS[tensor.kind](blocks)
            _check_finite(numbers, self._file.path, tensor.name)
            return numbers

        return StoredMatrix(layout, rows, inputs, read)

    def _with_halves_of_heads(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of queries and keys as the model has them: the first half of a head, then the second."""
        architecture = self._file.architecture
        if not is_paired(architecture, name):
            return rows
        facts, key = self._file.facts, f"{architecture}.attention.head_count"
        if ".k_proj" in name and f"{key}_kv" in facts:  # without it there are as many heads of keys as of queries
            key = f"{key}_kv"
        heads = facts.get(key)
        if not isinstance(heads, int) or heads < 1 or len(rows) % (2 * heads):
            raise ConfigError(f"{self._file.path}: {key} is {heads!r}", field="model")
        pairs = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


class _Mapped:
    """A mapped file, closed with those who read it; arrays over it keep it longer."""

    def __init__(self, region: mmap.mmap) -> None:
        self.region = region

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.region.close()
        except BufferError:  # an array over it is still there
            return


def _check_finite(numbers: StoredNumbers, path: Path, name: str) -> None:
    for each in (numbers.scales, numbers.mins, numbers.supers):
        if each is not None and each.is_floating_point() and not bool(each.isfinite().all()):
            raise ConfigError(f"{path}: tensor {name} has a scale that is not a number", field="model")


def _float16_at(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the float16 at this byte of each block [rows, blocks]."""
    return blocks[:, :, start : start + 2].contiguous().view(torch.float16)[:, :, 0]


def _split(content: torch.Tensor, parts: int) -> torch.Tensor:
    """Cuts the bytes of each block into equal parts [rows, blocks, parts, bytes]."""
    return content.reshape(*content.shape[:2], parts, -1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns low halves of all bytes, then their high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _q4(blocks: torch.Tensor, *, has_min: bool) -> StoredNumbers:
    start = 4 if has_min else 2
    codes = _nibbles(blocks[:, :, start:]).reshape(len(blocks), -1)
    return StoredNumbers(codes, _float16_at(blocks, 0), _float16_at(blocks, 2) if has_min else None)


def _q5(blocks: torch.Tensor, *, has_min: bool) -> StoredNumbers:
    start = 4 if has_min else 2
    upper = blocks[:, :, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    codes = _nibbles(blocks[:, :, start + 4 :]) | upper.flatten(2) << 4
    return StoredNumbers(
        codes.reshape(len(blocks), -1), _float16_at(blocks, 0), _float16_at(blocks, 2) if has_min else None
    )


def _q8(blocks: torch.Tensor) -> StoredNumbers:
    return StoredNumbers(blocks[:, :, 2:].reshape(len(blocks), -1).view(torch.int8), _float16_at(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> StoredNumbers:
    return StoredNumbers(_nibbles(blocks[:, :, 1:]).reshape(len(blocks), -1), blocks[:, :, 0].contiguous())


def _small_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and mins of 6 bits [rows, groups], of the 12 bytes after the two numbers of a block."""
    first, second, third = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scales.reshape(len(blocks), -1), mins.reshape(len(blocks), -1)


def _q45_k(blocks: torch.Tensor, *, has_fifth: bool) -> StoredNumbers:
    scales, mins = _small_scales(blocks)
    start = 48 if has_fifth else 16
    codes = _nibbles(_split(blocks[:, :, start:], 4)).flatten(2)
    if has_fifth:
        upper = blocks[:, :, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
        codes = codes | upper.flatten(2) << 4
    supers = torch.stack([_float16_at(blocks, 0), _float16_at(blocks, 2)], dim=-1)
    return StoredNumbers(codes.reshape(len(blocks), -1), scales, mins, supers)


def _q6_k(blocks: torch.Tensor) -> StoredNumbers:
    low = _split(blocks[:, :, :128], 2)
    upper = _split(blocks[:, :, 128:192], 2)
    quarters = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    codes = _nibbles(low) | quarters << 4
    scales = blocks[:, :, 192:208].reshape(len(blocks), -1).view(torch.int8)
    return StoredNumbers(codes.reshape(len(blocks), -1), scales, None, _float16_at(blocks, 208)[..., None].contiguous())


READERS: Final[dict[str, Callable[[torch.Tensor], StoredNumbers]]] = {
    "Q4_0": lambda blocks: _q4(blocks, has_min=False),
    "Q4_1": lambda blocks: _q4(blocks, has_min=True),
    "Q5_0": lambda blocks: _q5(blocks, has_min=False),
    "Q5_1": lambda blocks: _q5(blocks, has_min=True),
    "Q8_0": _q8,
    "Q4_K": lambda blocks: _q45_k(blocks, has_fifth=False),
    "Q5_K": lambda blocks: _q45_k(blocks, has_fifth=True),
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
"""Readers by tensor type: each makes the content of its blocks [rows, blocks, bytes], as llama.cpp's ggml-quants.c
does."""
