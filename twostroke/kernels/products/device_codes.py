"""Quantised matrices in a device's memory, and their products. Each code becomes a number where it is multiplied.

A row is an output. Codes are in tiles of 64 outputs and 64 inputs, one after the other for all inputs of 64 outputs.
Within a tile they have the order in which the 128 threads of the tensor cores take them: a thread has two outputs and
each eighth pair of inputs. So 16 neighbouring bytes belong to one thread, and no code moves between threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.nn import functional

from twostroke.kernels.layout import (
    DEVICE_MINS,
    DEVICE_SCALES,
    DEVICE_TILE,
    Layout,
    device_bits,
)
from twostroke.kernels.products.stored import FP4_HALVES, StoredMatrix, scales_and_mins

SIGN: Final = 128
"""The offset of codes that are signed in the file: on a device they are unsigned."""

KINDS: Final = ("int4", "fp4", "int8", "fp8")
"""Kinds of codes: integers and FP4 of 4 bits, integers and FP8 (E4M3) of 8 bits. Integers are unsigned."""

PLACES: Final = {
    # 64 outputs = 4 x 2 x 8, 64 inputs = 4 x 2 x 4 x 2
    4: ((4, 2, 8, 4, 2, 4, 2), (0, 2, 5, 3, 1, 4, 6)),
    # 64 outputs = 4 x 2 x 8, 64 inputs = 2 x 2 x 2 x 4 x 2
    8: ((4, 2, 8, 2, 2, 2, 4, 2), (3, 0, 2, 6, 4, 5, 1, 7)),
}
"""The layout of a tile [64 outputs, 64 inputs] by the bits of a code: (the factors of its two sizes, the order in which
memory has these factors as dimensions). Packing is a reshape to the factors and a permute to the order."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """A quantised matrix [outputs, inputs]. A weight is (code - offset) * scale + min, rounded to the inputs' dtype."""

    kind: str
    codes: torch.Tensor
    """int32 [outputs / 64, words of 64 outputs], whose lowest bits are the first code's."""
    scales: torch.Tensor
    """[groups, outputs]"""
    mins: torch.Tensor | None
    """[groups, outputs]"""
    order: torch.Tensor | None
    """int32 [inputs]: the input that each column of codes multiplies; None where that is its own."""
    inputs: int
    group: int
    """Number of inputs that share a scale."""
    offset: int
    """Number that is subtracted from integer codes."""

    @classmethod
    def of(cls, matrix: StoredMatrix, device: torch.device) -> DeviceMatrix:
        """Reads the matrix and copies it to the device. Raises ConfigError where it cannot be read."""
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
            offset=SIGN if layout.bits == 8 else layout.offset,
        )

    @property
    def outputs(self) -> int:
        return self.scales.shape[1]


class CodeProducts(Protocol):
    """Products of rows with a quantised matrix."""

    def product(self, x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Writes x [rows, inputs] W^T + bias [outputs] to `out` [rows, outputs], whose rows may have any stride."""


class TorchCodeProducts:
    """`CodeProducts` on any device. It expands the matrix for each product."""

    def product(self, x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        columns = x if matrix.order is None else x[:, matrix.order.long()]
        out.copy_(functional.linear(columns, weights_of(matrix).to(x.dtype), bias))


def weights_of(matrix: DeviceMatrix) -> torch.Tensor:
    """Returns float32 [outputs, inputs], columns in the order of codes."""
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
    """Returns int32 [outputs / 64, words] of codes [outputs, inputs], with zeros after the last output and input."""
    outputs, inputs = codes.shape
    content, bits = codes.view(torch.uint8), device_bits(layout)
    if layout.bits == 8 and not layout.is_fp8:
        content = content ^ SIGN
    tiles = -(-outputs // DEVICE_TILE), -(-inputs // DEVICE_TILE)
    wide = torch.zeros(tiles[0] * DEVICE_TILE, tiles[1] * DEVICE_TILE, dtype=torch.uint8)
    wide[:outputs, :inputs] = content
    parts, order = PLACES[bits]
    of_tiles = wide.view(tiles[0], DEVICE_TILE, tiles[1], DEVICE_TILE).transpose(1, 2).reshape(*tiles, *parts)
    in_order = of_tiles.permute(0, 1, *(2 + part for part in order)).reshape(tiles[0], -1)
    if bits == 4:
        in_order = in_order[:, ::2] | in_order[:, 1::2] << 4
    return in_order.view(torch.int32)


def _unpacked(matrix: DeviceMatrix) -> torch.Tensor:
    """Returns float32 [outputs, inputs], with padding after the last input."""
    in_order, bits = matrix.codes.view(torch.uint8), 4 if matrix.kind.endswith("4") else 8
    if bits == 4:
        in_order = torch.stack([in_order & 15, in_order >> 4], dim=2).flatten(1)
    parts, order = PLACES[bits]
    of_tiles = in_order.view(len(in_order), -1, *(parts[part] for part in order))
    back = of_tiles.permute(0, 1, *(2 + order.index(part) for part in range(len(parts))))
    square = back.reshape(len(in_order), -1, DEVICE_TILE, DEVICE_TILE)
    codes = square.transpose(1, 2).reshape(len(in_order) * DEVICE_TILE, -1)[: matrix.outputs].contiguous()
    if matrix.kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if matrix.kind == "fp4":
        return torch.tensor(FP4_HALVES, dtype=torch.float32, device=codes.device)[codes.int()]
    return codes.float() - matrix.offset
