"""Products with quantised weights: each program takes some outputs and a tile of rows. Tests compare it with
`TorchCodeProducts`.

Weights are the left operand, so that they go from codes through registers to the tensor cores. Codes lie in memory as
the threads of a product hold them, so no thread needs the codes of another. A program walks all inputs in order,
whatever its tiles are: a row's bits do not depend on its place in a tile, on the rows beside it, or on the number of
rows. Each weight has the bits that expanding it to the rows' dtype would give. Many rows are multiplied by a library
with weights that were expanded for them; an H100's products of either kind have the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.layout import DEVICE_TILE, EXPANDED_BYTES
from twostroke.kernels.products.device_codes import KINDS, DeviceMatrix
from twostroke.kernels.triton.checks import DTYPES

TWO_TO_23: Final = 150 << 23
"""The bits of 2^23 as a float32, whose last bit has the value 1. It is an argument, since one instruction takes only
one constant."""
EXPANDED_ROWS: Final = 1024
"""Number of rows from which a library multiplies plain numbers: expanding the matrix once is faster than once for each
tile."""

MANY_OUTPUTS: Final = 8192
"""Number of outputs from which tiles of 128 outputs keep half of a device's multiprocessors busy, and read x half as
often."""
EXPAND_INPUTS: Final = 128
"""Inputs of a program that expands. A row of its tile fills two or four cache lines."""


@dataclass(frozen=True, slots=True)
class CodesTuning:
    rows: int
    """Rows of x of a tile."""
    outputs: int
    """Outputs of a tile, a multiple of 64, which the tensor cores of four warps multiply."""
    inputs: int
    """Inputs of each iteration, a multiple of 64."""
    warps: int
    stages: int


def codes_tuning(rows: int, outputs: int, dtype: torch.dtype) -> CodesTuning:
    """Returns the tuning for Hopper: many programs for few rows. Each code is expanded for as many rows as the
    registers hold.
    """
    if dtype == torch.float32:
        return CodesTuning(rows=16 if rows <= 16 else 64, outputs=64, inputs=64, warps=4, stages=2)
    if rows <= 16:
        return CodesTuning(rows=16, outputs=64, inputs=128, warps=4, stages=4)
    if rows <= 64 and outputs < MANY_OUTPUTS:
        return CodesTuning(rows=64, outputs=64, inputs=128, warps=4, stages=3)
    if rows <= 64:
        return CodesTuning(rows=64, outputs=128, inputs=128, warps=8, stages=3)
    if rows <= 128:
        return CodesTuning(rows=128, outputs=128, inputs=64, warps=8, stages=3)
    return CodesTuning(rows=256, outputs=128, inputs=64, warps=8, stages=3)


class TritonCodeProducts:
    def product(self, x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        _check(x, matrix, bias, out)
        columns = x if matrix.order is None else x.index_select(1, matrix.order)
        if len(x) >= EXPANDED_ROWS and x.dtype != torch.float32:
            product_of_expanded(columns, matrix, bias, out)
        else:
            product_of_codes(columns, matrix, bias, out, codes_tuning(len(x), matrix.outputs, x.dtype))


def product_of_codes(
    x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor, tuning: CodesTuning
) -> None:
    """Multiplies columns in the order of codes."""
    rows, outputs = out.shape
    # outputs fastest: programs that run together share the rows of x, and each code is read once by a tile of rows
    codes_kernel[(triton.cdiv(outputs, tuning.outputs), triton.cdiv(rows, tuning.rows))](
        x, matrix.codes, matrix.scales, matrix.scales if matrix.mins is None else matrix.mins,
        x if bias is None else bias, out,
        rows, outputs, matrix.inputs, matrix.codes.shape[1], out.stride(0), TWO_TO_23,
        **constants_of(matrix, tuning.inputs), HAS_BIAS=bias is not None, ROWS=tuning.rows, OUTPUTS=tuning.outputs,
        num_warps=tuning.warps, num_stages=tuning.stages, enable_fp_fusion=False,
    )  # fmt: skip


def product_of_expanded(x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Expands some outputs at a time into plain numbers, which torch multiplies."""
    most = max(DEVICE_TILE, EXPANDED_BYTES // (matrix.inputs * x.itemsize) // DEVICE_TILE * DEVICE_TILE)
    weights = x.new_empty(min(most, matrix.outputs), matrix.inputs)
    for first in range(0, matrix.outputs, most):
        part = weights[: matrix.outputs - first]
        expand(matrix, first, part)
        of_part = slice(first, first + len(part))
        if bias is None:
            torch.mm(x, part.t(), out=out[:, of_part])
        else:
            torch.addmm(bias[of_part], x, part.t(), out=out[:, of_part])


def expand(matrix: DeviceMatrix, first: int, weights: torch.Tensor) -> None:
    """Writes the weights [outputs, inputs] of the outputs from `first` on, which is a multiple of 64."""
    expand_kernel[(triton.cdiv(len(weights), DEVICE_TILE), triton.cdiv(matrix.inputs, EXPAND_INPUTS))](
        weights, matrix.codes, matrix.scales, matrix.scales if matrix.mins is None else matrix.mins,
        first // DEVICE_TILE, first + len(weights), matrix.outputs, matrix.inputs, matrix.codes.shape[1], TWO_TO_23,
        **constants_of(matrix, EXPAND_INPUTS), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def constants_of(matrix: DeviceMatrix, step: int) -> dict[str, int | bool]:
    """Returns the compile-time constants of a kernel that takes `step` inputs at a time."""
    return {
        "KIND": KINDS.index(matrix.kind),
        "OFFSET": matrix.offset,
        "GROUP": matrix.group,
        "PART": math.gcd(matrix.group, step) if len(matrix.scales) > 1 else step,
        "GROUPS": len(matrix.scales),
        "HAS_MINS": matrix.mins is not None,
        "STEP": step,
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
def number_of(words, two_to_23, PLACE: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Returns the codes at one position of each word as float32, less their offset. KIND is an index into `KINDS`."""
    BITS: tl.constexpr = 4 if KIND < 2 else 8
    if KIND % 2 == 0:
        # integers: the code becomes the last bits of an integer that float32 holds from the code's place on
        SHIFT: tl.constexpr = PLACE * BITS % 16
        lowest: tl.constexpr = (1 << (23 - SHIFT)) + OFFSET
        of_half = words if PLACE * BITS < 16 else words >> 16
        lifted = (of_half & (((1 << BITS) - 1) << SHIFT)) | (two_to_23 - (SHIFT << 23))
        result = lifted.to(tl.float32, bitcast=True) - lowest
    else:
        # sign, exponent and fraction move to where float32 has them; the factor moves the exponent's bias
        top = words << (32 - BITS * (PLACE + 1))
        if KIND == 1:  # halves of FP4 (E2M1)
            result = ((top >> 6) & -2118123520).to(tl.float32, bitcast=True) * 1.7014118346046923e38
        else:
            result = ((top >> 4) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return result


@triton.jit
def pair_of(words, two_to_23, PLACE: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    return tl.join(
        number_of(words, two_to_23, PLACE, KIND, OFFSET), number_of(words, two_to_23, PLACE + 1, KIND, OFFSET)
    )


@triton.jit
def numbers_of(words, two_to_23, TILES: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Returns numbers [outputs, inputs] of the words of TILES tiles of outputs, each with STEPS tiles of inputs."""
    if KIND < 2:
        upper = tl.join(pair_of(words, two_to_23, 0, KIND, OFFSET), pair_of(words, two_to_23, 2, KIND, OFFSET))
        lower = tl.join(pair_of(words, two_to_23, 4, KIND, OFFSET), pair_of(words, two_to_23, 6, KIND, OFFSET))
        # inputs / 64, outputs / 64, outputs / 16, outputs, inputs / 2, inputs / 16, inputs, inputs / 8, outputs / 8
        split = tl.reshape(tl.join(upper, lower), (STEPS, TILES, 4, 8, 4, 4, 2, 2, 2))
        ordered = tl.permute(split, (1, 2, 8, 3, 0, 5, 7, 4, 6))
    else:
        both = tl.join(pair_of(words, two_to_23, 0, KIND, OFFSET), pair_of(words, two_to_23, 2, KIND, OFFSET))
        # inputs / 64, / 32, outputs / 64, / 16, outputs, inputs / 2, inputs / 16, inputs / 8, inputs, outputs / 8
        split = tl.reshape(both, (STEPS, 2, TILES, 4, 8, 4, 2, 2, 2, 2))
        ordered = tl.permute(split, (2, 3, 9, 4, 0, 1, 6, 7, 5, 8))
    return tl.reshape(ordered, (64 * TILES, 64 * STEPS))


@triton.jit
def of_groups(numbers, first, output, is_output, outputs,
              GROUP: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Returns scales or mins [outputs, STEP / PART] of the inputs from `first` on."""
    group = (first + tl.arange(0, STEP // PART) * PART) // GROUP
    # numbers: group, output
    at = numbers + group[None, :] * outputs + output[:, None]
    return tl.load(at, mask=is_output[:, None] & (group < GROUPS)[None, :], other=0.0)


@triton.jit
def by_input(of_parts, OUTPUTS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr):
    """Returns the number of each part, repeated for the part's inputs."""
    wide = tl.broadcast_to(of_parts.to(tl.float32)[:, :, None], (OUTPUTS, STEP // PART, PART))
    return tl.reshape(wide, (OUTPUTS, STEP))


@triton.jit
def places_of(tile, outputs, row_words,
              TILES: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Returns (offsets of the codes' words, offsets from the first word of their tile of outputs, whether that tile
    exists)."""
    # words: tile of inputs and 512 words of it, tile of outputs, word
    each = tl.arange(0, STEPS * TILES * (512 if KIND < 2 else 1024))
    own = tile + each // 512 % TILES
    within = each // 512 // TILES * 512 + each % 512
    # codes: tile of outputs, word
    return own.to(tl.int64) * row_words + within, within, own * 64 < outputs


@triton.jit(do_not_specialize=["rows", "two_to_23"])
def codes_kernel(
    x, codes, scales, mins, bias, y,
    rows, outputs, inputs, row_words, y_stride, two_to_23,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
    HAS_MINS: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = OUTPUTS // 64
    STEPS: tl.constexpr = STEP // 64
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < outputs
    words_at, within, is_tile = places_of(tl.program_id(0) * TILES, outputs, row_words, TILES, STEPS, KIND)
    column = tl.arange(0, STEP)
    # x: row, input
    x_at = x + row.to(tl.int64)[:, None] * inputs + column[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    # scales and mins are a step ahead of codes, so that no step waits for them
    scale = of_groups(scales, 0, output, is_output, outputs, GROUP, PART, GROUPS, STEP)
    if HAS_MINS:
        low = of_groups(mins, 0, output, is_output, outputs, GROUP, PART, GROUPS, STEP)
    for first in tl.range(0, inputs, STEP):
        done = first // 64 * (512 if KIND < 2 else 1024)
        words = tl.load(codes + words_at + done, mask=is_tile & (within < row_words - done), other=0)
        numbers = tl.load(x_at + first, mask=is_row[:, None] & (column < inputs - first)[None, :], other=0.0)
        next_scale = of_groups(scales, first + STEP, output, is_output, outputs, GROUP, PART, GROUPS, STEP)
        weights = numbers_of(words, two_to_23, TILES, STEPS, KIND, OFFSET) * by_input(scale, OUTPUTS, PART, STEP)
        scale = next_scale
        if HAS_MINS:
            next_low = of_groups(mins, first + STEP, output, is_output, outputs, GROUP, PART, GROUPS, STEP)
            weights += by_input(low, OUTPUTS, PART, STEP)
            low = next_low
        acc = tl.dot(weights.to(x.dtype.element_ty), tl.trans(numbers), acc, input_precision="tf32x3")
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    # y: row, output; transposed
    y_at = y + row.to(tl.int64)[None, :] * y_stride + output[:, None]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["first_tile", "end", "two_to_23"])
def expand_kernel(
    w, codes, scales, mins,
    first_tile, end, outputs, inputs, row_words, two_to_23,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
    HAS_MINS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = STEP // 64
    tile, first = first_tile + tl.program_id(0), tl.program_id(1) * STEP
    output, column = tile * 64 + tl.arange(0, 64), first + tl.arange(0, STEP)
    is_output = output < end
    words_at, within, is_tile = places_of(tile, outputs, row_words, 1, STEPS, KIND)
    done = first // 64 * (512 if KIND < 2 else 1024)
    words = tl.load(codes + words_at + done, mask=is_tile & (within < row_words - done), other=0)
    scale = of_groups(scales, first, output, is_output, outputs, GROUP, PART, GROUPS, STEP)
    weights = numbers_of(words, two_to_23, 1, STEPS, KIND, OFFSET) * by_input(scale, 64, PART, STEP)
    if HAS_MINS:
        low = of_groups(mins, first, output, is_output, outputs, GROUP, PART, GROUPS, STEP)
        weights += by_input(low, 64, PART, STEP)
    # w: output, input
    w_at = w + (output - first_tile * 64).to(tl.int64)[:, None] * inputs + column[None, :]
    tl.store(w_at, weights.to(w.dtype.element_ty), mask=is_output[:, None] & (column < inputs)[None, :])
