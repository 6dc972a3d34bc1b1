"""Products of codes: each program takes some outputs and a tile of rows; the twin is `TorchCodeProducts`.

Weights are the left operand, so that they go from codes through registers to the tensor cores. There is one shape of
tiles, and a program walks all inputs in order: a row's bits depend neither on its place in a tile nor on who is beside
it, and not on how many rows there are. Each weight has the bits that expanding it to the rows' dtype would give.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.device_codes import KINDS, DeviceMatrix
from twostroke.kernels.layout import DEVICE_TILE_BYTES
from twostroke.kernels.triton.bytes import decoded
from twostroke.kernels.triton.checks import DTYPES

ROWS: Final = 64
"""Rows of a tile. Fewer would expand codes more often for the rows of a prompt, more would multiply longer for one."""
OUTPUTS: Final = 64
"""Outputs of a tile: the least that Hopper's products of four warps have."""


def stages_of(dtype: torch.dtype) -> int:
    """Return how many tiles of codes and rows are in flight: many, because a program's bytes of codes are few."""
    return 2 if dtype == torch.float32 else 4


class TritonCodeProducts:
    def product(self, x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        _check(x, matrix, bias, out)
        rows, outputs = out.shape
        # outputs fastest: programs that run together share the rows of x, and each code is read once by a tile of rows
        codes_kernel[(triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, ROWS))](
            x, matrix.codes, matrix.scales, matrix.scales if matrix.mins is None else matrix.mins,
            matrix.codes if matrix.order is None else matrix.order, x if bias is None else bias, out,
            rows, outputs, matrix.inputs, matrix.codes.shape[1], out.stride(0),
            **constants_of(matrix, has_bias=bias is not None),
            num_warps=4, num_stages=stages_of(x.dtype), enable_fp_fusion=False,
        )  # fmt: skip


def constants_of(matrix: DeviceMatrix, *, has_bias: bool) -> dict[str, int | bool]:
    """Return what the kernel is compiled for."""
    return {
        "KIND": KINDS.index(matrix.kind),
        "OFFSET": matrix.offset,
        "GROUP": matrix.group,
        "PART": math.gcd(matrix.group, DEVICE_TILE_BYTES) if len(matrix.scales) > 1 else DEVICE_TILE_BYTES,
        "GROUPS": len(matrix.scales),
        "HAS_MINS": matrix.mins is not None,
        "HAS_ORDER": matrix.order is not None,
        "HAS_BIAS": has_bias,
        "ROWS": ROWS,
        "OUTPUTS": OUTPUTS,
        "TILE": DEVICE_TILE_BYTES,
    }


def _check(x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    assert x.dtype in DTYPES, f"x must be one of {DTYPES}, got {x.dtype}"
    assert x.ndim == 2, f"x must be [rows, inputs], got {tuple(x.shape)}"
    assert x.shape[1] == matrix.inputs, f"rows of {x.shape[1]} inputs for a matrix of {matrix.inputs}"
    assert x.is_contiguous(), f"x must be contiguous, got strides {x.stride()}"
    assert out.shape == (len(x), matrix.outputs), f"out must be {(len(x), matrix.outputs)}, got {tuple(out.shape)}"
    assert out.stride(1) == 1, f"columns of out must lie side by side, got strides {out.stride()}"
    assert out.dtype == x.dtype, f"out must be in the rows' {x.dtype}, got {out.dtype}"
    assert bias is None or bias.shape == (matrix.outputs,), f"a bias is [{matrix.outputs}]"


@triton.jit
def numbers_of(codes, HALF: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, BYTE_KIND: tl.constexpr):
    """The codes of a tile's low or high halves as float32, less their offset; KIND as `KINDS` has it."""
    if KIND >= 2:
        result = decoded(codes, BYTE_KIND)
    else:
        nibble = (codes.to(tl.int32) >> (4 * HALF)) & 15
        if KIND == 0:
            result = (nibble - OFFSET).to(tl.float32)
        else:
            # halves of FP4 (E2M1): fractions below 2, then 2 or 3 times a power of two
            size = nibble & 7
            power = tl.maximum((size >> 1) - 1, 0)
            whole = tl.where(size < 2, size, (2 + (size & 1)) << power)
            result = tl.where(nibble < 8, whole, -whole).to(tl.float32)
    return result


@triton.jit
def by_input(of_groups, first, output, is_output, outputs,
             GROUP: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
             OUTPUTS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Scales or mins of the inputs from `first` on: each of a group's is loaded once and repeated."""
    group = (first + tl.arange(0, TILE // PART) * PART) // GROUP
    # of_groups: group, output
    at = of_groups + group[None, :] * outputs + output[:, None]
    found = tl.load(at, mask=is_output[:, None] & (group < GROUPS)[None, :], other=0.0).to(tl.float32)
    if PART == TILE:
        result = tl.broadcast_to(found, (OUTPUTS, TILE))
    else:
        wide = tl.broadcast_to(found[:, :, None], (OUTPUTS, TILE // PART, PART))
        result = tl.reshape(wide, (OUTPUTS, TILE))
    return result


@triton.jit(do_not_specialize=["rows"])
def codes_kernel(
    x, codes, scales, mins, order, bias, y,
    rows, outputs, inputs, row_bytes, y_stride,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
    HAS_MINS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 2 if KIND < 2 else 1
    BYTE_KIND: tl.constexpr = 1 if KIND == 2 else 2
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < outputs
    each = tl.arange(0, TILE)
    # codes: output, byte
    codes_at = codes + output.to(tl.int64)[:, None] * row_bytes + each[None, :]
    # x: row, input; transposed
    x_at = x + row.to(tl.int64)[None, :] * inputs
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for tile in tl.range(0, row_bytes, TILE):
        packed = tl.load(codes_at + tile, mask=is_output[:, None], other=0)
        for half in tl.static_range(HALVES):
            first = tile * HALVES + half * TILE
            weights = numbers_of(packed, half, KIND, OFFSET, BYTE_KIND)
            weights *= by_input(scales, first, output, is_output, outputs, GROUP, PART, GROUPS, OUTPUTS, TILE)
            if HAS_MINS:
                weights += by_input(mins, first, output, is_output, outputs, GROUP, PART, GROUPS, OUTPUTS, TILE)
            column = first + each
            is_input = column < inputs
            if HAS_ORDER:
                column = tl.load(order + column, mask=is_input, other=0)
            numbers = tl.load(x_at + column[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
            acc = tl.dot(weights.to(x.dtype.element_ty), numbers, acc, input_precision="tf32x3")
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    # y: row, output; transposed
    y_at = y + row.to(tl.int64)[None, :] * y_stride + output[:, None]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])
