"""Matrices of codes in a device's memory, and their products: each weight becomes a number where it is multiplied.

A row is an output. Codes of 4 bits lie in tiles of 64 bytes, whose low halves are the first 64 inputs of the tile and
whose high halves the next 64: so either half is multiplied with neighbouring inputs. Codes of 8 bits lie in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.nn import functional

from twostroke.kernels.layout import (
    DEVICE_MINS,
    DEVICE_SCALES,
    DEVICE_TILE_BYTES,
    Layout,
    device_bits,
    device_row_bytes,
)
from twostroke.kernels.stored import FP4_HALVES, StoredMatrix, scales_and_mins

KINDS: Final = ("int4", "fp4", "int8", "fp8")
"""What codes are: integers and FP4 of 4 bits, integers and FP8 (E4M3) of 8 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """A matrix [outputs, inputs] of codes. A weight is (code - offset) * scale + min, rounded to the inputs' dtype."""

    kind: str
    codes: torch.Tensor
    """uint8 [outputs, bytes of a row]"""
    scales: torch.Tensor
    """[groups, outputs]"""
    mins: torch.Tensor | None
    """[groups, outputs]"""
    order: torch.Tensor | None
    """int32 [inputs]: which input each column of codes multiplies; None where that is its own."""
    inputs: int
    group: int
    """Inputs that share a scale."""
    offset: int
    """What is subtracted from codes of 4 bits."""

    @classmethod
    def of(cls, matrix: StoredMatrix, device: torch.device) -> DeviceMatrix:
        """Read the matrix and bring it to the device. Raises ConfigError where it cannot be read."""
        layout, numbers = matrix.layout, matrix.read()
        scales, mins = scales_and_mins(numbers, layout)
        scale_dtype, min_dtype = _dtypes(layout)
        if matrix.factors is not None:  # the products of narrow scales and powers of two may leave their dtype
            scales, scale_dtype = scales * matrix.factors[:, None], torch.float32
            mins, min_dtype = None if mins is None else mins * matrix.factors[:, None], torch.float32
        return cls(
            kind=_kind(layout),
            codes=_packed(numbers.codes, layout).to(device),
            scales=scales.t().contiguous().to(device, scale_dtype),
            mins=None if mins is None else mins.t().contiguous().to(device, min_dtype),
            order=None if matrix.order is None else matrix.order.to(device),
            inputs=matrix.inputs,
            group=layout.group,
            offset=layout.offset if layout.bits == 4 else 0,
        )

    @property
    def outputs(self) -> int:
        return len(self.codes)


class CodeProducts(Protocol):
    """Products of rows with a matrix of codes."""

    def product(self, x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write x [rows, inputs] W^T + bias [outputs] to `out` [rows, outputs], whose rows lie any distance apart."""


class TorchCodeProducts:
    """Any device; expands the matrix for each product."""

    def product(self, x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        columns = x if matrix.order is None else x[:, matrix.order.long()]
        out.copy_(functional.linear(columns, weights_of(matrix).to(x.dtype), bias))


def weights_of(matrix: DeviceMatrix) -> torch.Tensor:
    """float32 [outputs, inputs], columns in the order of codes."""
    numbers = _unpacked(matrix)[:, : matrix.inputs]
    weights = numbers * _by_input(matrix.scales, matrix)
    return weights if matrix.mins is None else weights + _by_input(matrix.mins, matrix)


def _by_input(of_groups: torch.Tensor, matrix: DeviceMatrix) -> torch.Tensor:
    return of_groups.float().t().repeat_interleave(matrix.group, dim=1)[:, : matrix.inputs]


def _kind(layout: Layout) -> str:
    if layout.is_fp4:
        return "fp4"
    if layout.is_fp8:
        return "fp8"
    return f"int{device_bits(layout)}"


def _dtypes(layout: Layout) -> tuple[torch.dtype, torch.dtype]:
    scales: torch.dtype = getattr(torch, DEVICE_SCALES[layout.scales])
    mins: torch.dtype = getattr(torch, DEVICE_MINS.get(layout.mins, "float32"))
    return scales, mins


def _packed(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """uint8 [rows, bytes] of codes [rows, inputs], zeros behind the last input."""
    rows, inputs = codes.shape
    content = codes.view(torch.uint8)
    if 4 < layout.bits < 8:
        content = (content.to(torch.int8) - layout.offset).view(torch.uint8)
    width = device_row_bytes(layout, inputs) * 8 // device_bits(layout)
    wide = torch.zeros(rows, width, dtype=torch.uint8)
    wide[:, :inputs] = content
    if device_bits(layout) == 8:
        return wide
    low, high = wide.view(rows, -1, 2, DEVICE_TILE_BYTES).unbind(2)
    return (low | high << 4).flatten(1)


def _unpacked(matrix: DeviceMatrix) -> torch.Tensor:
    """float32 [outputs, inputs and more]"""
    codes = matrix.codes
    if matrix.kind == "int8":
        return codes.view(torch.int8).float()
    if matrix.kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    tiles = codes.view(len(codes), -1, DEVICE_TILE_BYTES)
    nibbles = torch.stack([tiles & 15, tiles >> 4], dim=2).flatten(1)
    if matrix.kind == "fp4":
        return torch.tensor(FP4_HALVES, dtype=torch.float32, device=codes.device)[nibbles.int()]
    return nibbles.float() - matrix.offset
