"""Reads tensors of safetensors files with quantised matrices: GPTQ, AWQ, FP8, compressed-tensors and MXFP4.

`READERS` is the table: for each method of `schemes`, the function that reads a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from twostroke.base.errors import ConfigError
from twostroke.kernels.products.stored import Matrix, StoredMatrix, StoredNumbers
from twostroke.models.weights.files import TensorFiles
from twostroke.models.weights.stored.coded_matrices import EXPERT_BLOCKS, CodedMatrices, CodedMatrix
from twostroke.models.weights.stored.schemes import Scheme

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each output's code in a word of eight codes of AWQ's "gemm" order."""

Tensors = Mapping[str, torch.Tensor]


class CodedTensors(TensorFiles):
    """The tensors of safetensors files with quantised matrices.

    Raises ConfigError for tensors that are missing or have another shape than in the config.
    """

    def __init__(
        self,
        directory: Path,
        coded: CodedMatrices,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        keeps_codes: bool,
    ) -> None:
        super().__init__(directory, dtype, device)
        self._coded = coded
        self._keeps_codes = keeps_codes

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor of this name as plain numbers, on the requested device and in the requested dtype."""
        matrix = self._coded.find(name)
        if matrix is None:
            return super().take(name, *shape)
        return self._stored(name, matrix, shape).dense().to(self._device, self._dtype)

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Returns the matrix as it is stored where codes are kept, and plain numbers otherwise."""
        matrix = self._coded.find(name)
        if matrix is None or not self._keeps_codes:
            return self.take(name, rows, inputs)
        return self._stored(name, matrix, (rows, inputs))

    def _stored(self, name: str, matrix: CodedMatrix, shape: tuple[int, ...]) -> StoredMatrix:
        if (matrix.rows, matrix.inputs) != shape:
            raise ConfigError(
                f"{self._directory}: {name} has shape {(matrix.rows, matrix.inputs)}, the config says {shape}",
                field="model",
            )
        module, scheme = name.removesuffix(".weight"), self._coded.scheme
        order = self._order(module, matrix)

        def read() -> StoredNumbers:
            tensors = {part: self._part(module, part, matrix) for part in matrix.parts}
            numbers = READERS[scheme.method](tensors, matrix, scheme)
            _check_scales(numbers, name)
            return numbers if order is None else _in_order(numbers, order)

        return StoredMatrix(matrix.layout, matrix.rows, matrix.inputs, read, order=order)

    def _part(self, module: str, part: str, matrix: CodedMatrix) -> torch.Tensor:
        if matrix.fused is None:
            return self._raw(f"{module}.{part}")
        name = f"{matrix.fused.name}_{part}"
        tensor: torch.Tensor = matrix.fused.take(self._file_of[name].get_slice(name))
        return tensor

    def _raw(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _order(self, module: str, matrix: CodedMatrix) -> torch.Tensor | None:
        """Returns the inputs in the order of their groups, int32 [inputs]; None where that is their own order."""
        part = next((part for part in ("g_idx", "weight_g_idx") if part in matrix.parts), None)
        if part is None:
            return None
        groups = self._raw(f"{module}.{part}").long()
        order = groups.argsort(stable=True)
        expected = torch.arange(matrix.inputs) // matrix.layout.group
        if not torch.equal(groups[order], expected):
            raise ConfigError(
                f"weights of {module} cannot be read: {part} has groups of other sizes than {matrix.layout.group}",
                field="model",
            )
        return None if torch.equal(order, torch.arange(matrix.inputs)) else order.int()


def _in_order(numbers: StoredNumbers, order: torch.Tensor) -> StoredNumbers:
    return StoredNumbers(numbers.codes[:, order.long()], numbers.scales, numbers.mins, numbers.supers)


def _check_scales(numbers: StoredNumbers, name: str) -> None:
    scales = numbers.scales
    is_wrong = scales == 255 if scales.dtype == torch.uint8 else ~scales.isfinite()
    if bool(is_wrong.any()):
        raise ConfigError(f"weights: {name} has a scale that is not a number", field="model")


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns uint8 [.., words * codes] of int32 words, the lowest bits first."""
    content = words.contiguous().view(torch.uint8)
    if bits == 8:
        return content
    return torch.stack([content & 15, content >> 4], dim=-1).flatten(-2)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """Returns unsigned codes as int8, with 128 subtracted."""
    return (codes.int() - 128).to(torch.int8)


def _ints(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scheme: Scheme) -> StoredNumbers:
    """Returns numbers of unsigned codes and zeros [rows, ..]. Zeros are ignored where the scheme is symmetric."""
    if scheme.is_symmetric:
        zeros = None
    if scheme.bits == 8:
        return StoredNumbers(_signed(codes), scales, None if zeros is None else (zeros.int() - 128).to(torch.int8))
    return StoredNumbers(codes, scales, zeros)


def _gptq(tensors: Tensors, matrix: CodedMatrix, scheme: Scheme) -> StoredNumbers:
    codes = _unpacked(tensors["qweight"].t(), scheme.bits)
    zeros = _unpacked(tensors["qzeros"], scheme.bits).t()[: matrix.rows].int() + scheme.zero_bias
    half = 1 << scheme.bits - 1
    if scheme.is_symmetric and not bool((zeros == half).all()):
        raise ConfigError(f"weights say that they are symmetric, but zeros are not {half}", field="model")
    return _ints(codes, tensors["scales"].t().contiguous(), zeros.to(torch.uint8).contiguous(), scheme)


def _awq(tensors: Tensors, _matrix: CodedMatrix, scheme: Scheme) -> StoredNumbers:
    def outputs_of(words: torch.Tensor) -> torch.Tensor:
        eights = _unpacked(words, 4).view(len(words), -1, 8)
        return eights[..., list(AWQ_ORDER)].flatten(1).t().contiguous()

    return _ints(
        outputs_of(tensors["qweight"]), tensors["scales"].t().contiguous(), outputs_of(tensors["qzeros"]), scheme
    )


def _packed_int(tensors: Tensors, matrix: CodedMatrix, scheme: Scheme) -> StoredNumbers:
    codes, zeros = _unpacked(tensors["weight_packed"], scheme.bits), None
    if not scheme.is_symmetric:
        zeros = _unpacked(tensors["weight_zero_point"].t(), scheme.bits).t()[: matrix.rows].contiguous()
    return _ints(codes, tensors["weight_scale"], zeros, scheme)


def _int8(tensors: Tensors, matrix: CodedMatrix, scheme: Scheme) -> StoredNumbers:
    zeros = None if scheme.is_symmetric else _by_row(tensors["weight_zero_point"], matrix)
    return StoredNumbers(tensors["weight"], _by_row(tensors["weight_scale"], matrix), zeros)


def _fp8(tensors: Tensors, matrix: CodedMatrix, scheme: Scheme) -> StoredNumbers:
    scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scales is not None, "found in the header"
    if scheme.block is None:
        return StoredNumbers(tensors["weight"], _by_row(scales, matrix))
    return StoredNumbers(
        tensors["weight"], scales.repeat_interleave(scheme.block[0], dim=0)[: matrix.rows].contiguous()
    )


def _mxfp4(tensors: Tensors, _matrix: CodedMatrix, _scheme: Scheme) -> StoredNumbers:
    return StoredNumbers(_unpacked(tensors["weight_packed"], 4), tensors["weight_scale"].view(torch.uint8))


def _expert_blocks(tensors: Tensors, _matrix: CodedMatrix, _scheme: Scheme) -> StoredNumbers:
    return StoredNumbers(_unpacked(tensors["blocks"].flatten(1), 4), tensors["scales"].view(torch.uint8))


def _by_row(scales: torch.Tensor, matrix: CodedMatrix) -> torch.Tensor:
    """Returns scales [rows, groups]. The file may have one for each row, or one for all."""
    groups = matrix.inputs // matrix.layout.group
    wide = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(matrix.rows, -1)
    return wide.expand(matrix.rows, groups).contiguous()


READERS: Final[dict[str, Callable[[Tensors, CodedMatrix, Scheme], StoredNumbers]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "int8": _int8,
    "packed int": _packed_int,
    "mxfp4": _mxfp4,
    EXPERT_BLOCKS: _expert_blocks,
}
"""The function that reads a matrix, by method."""
