"""Products of experts: each program takes a tile of one expert's pairs and some outputs. Tests compare it with
`TorchGrouped`.

Tiles have one shape, and a program walks all inputs in order: a row's bits do not depend on its position in a tile, on
other rows, or on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.kernels.products.grouped import TILE_ROWS, RoutedPairs
from twostroke.kernels.triton.checks import DTYPES

COMBINED_COLUMNS = 1024
"""Columns of a program that adds up the outputs of experts."""


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    outputs: int
    """Outputs of a tile."""
    inputs: int
    """Inputs per iteration."""
    warps: int
    stages: int


def grouped_tuning(dtype: torch.dtype) -> GroupedTuning:
    """Returns the tuning for Hopper: a tile of weights in use and two in flight, 16 KiB each. Tiles of float32 are
    smaller.
    """
    if dtype == torch.float32:
        return GroupedTuning(outputs=64, inputs=32, warps=4, stages=2)
    return GroupedTuning(outputs=128, inputs=64, warps=4, stages=3)


class TritonGrouped:
    def gathered(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs
    ) -> torch.Tensor:
        return _launch(x, weight, bias, pairs, is_gather=True)

    def scattered(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs
    ) -> torch.Tensor:
        return _launch(x, weight, bias, pairs, is_gather=False)

    def combined(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, per_token = weights.shape
        assert len(answers) == rows * per_token, f"{len(answers)} answers for {rows * per_token} pairs"
        assert answers.is_contiguous(), f"answers must be contiguous, got strides {answers.stride()}"
        assert weights.is_contiguous(), f"weights must be contiguous, got strides {weights.stride()}"
        width = answers.shape[1]
        out = torch.empty(rows, width, dtype=torch.float32, device=answers.device)
        combine_kernel[(triton.cdiv(width, COMBINED_COLUMNS), rows)](
            answers, weights, out, width, PER_TOKEN=per_token, COLUMNS=COMBINED_COLUMNS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs, *, is_gather: bool
) -> torch.Tensor:
    _, outputs, inputs = weight.shape
    assert x.dtype in DTYPES, f"x must be one of {DTYPES}, got {x.dtype}"
    assert weight.dtype == x.dtype, f"weights must be in the rows' {x.dtype}, got {weight.dtype}"
    assert x.shape[1] == inputs, f"rows of {x.shape[1]} inputs for weights of {inputs}"
    assert x.is_contiguous(), f"x must be contiguous, got strides {x.stride()}"
    assert weight.is_contiguous(), f"weights must be contiguous, got strides {weight.stride()}"
    rows = len(pairs.order) // pairs.per_token if is_gather else len(pairs.order)
    assert len(x) == rows, f"{len(x)} rows where there are {rows}"
    tuning = grouped_tuning(x.dtype)
    y = torch.empty(len(pairs.order), outputs, dtype=x.dtype, device=x.device)
    # outputs fastest: programs that run together share the rows of x, and each part of the weights is read once
    grouped_kernel[(triton.cdiv(outputs, tuning.outputs), len(pairs.tile_starts))](
        x, weight, x if bias is None else bias, y, pairs.order, pairs.tile_starts, pairs.tile_ends, pairs.tile_experts,
        pairs.per_token, outputs, inputs,
        IS_GATHER=is_gather, HAS_BIAS=bias is not None, ROWS=TILE_ROWS, OUTPUTS=tuning.outputs, INPUTS=tuning.inputs,
        num_warps=tuning.warps, num_stages=tuning.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["per_token"])
def grouped_kernel(
    x, weight, bias, y, order, tile_starts, tile_ends, tile_experts,
    per_token, outputs, inputs,
    IS_GATHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    start, end = tl.load(tile_starts + tile), tl.load(tile_ends + tile)
    if start >= end:
        return

    place = start + tl.arange(0, ROWS)
    asked = place < end
    pair = tl.load(order + place, mask=asked, other=0)
    source = pair // per_token if IS_GATHER else place
    target = place if IS_GATHER else pair
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    expert = tl.load(tile_experts + tile).to(tl.int64)
    each = tl.arange(0, INPUTS)
    # x: row, input
    x_at = x + source.to(tl.int64)[:, None] * inputs + each[None, :]
    # weight: expert, output, input
    weight_at = weight + (expert * outputs + output)[None, :] * inputs + each[:, None]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in tl.range(0, inputs, INPUTS):
        is_input = first + each < inputs
        rows = tl.load(x_at + first, mask=asked[:, None] & is_input[None, :], other=0.0)
        numbers = tl.load(weight_at + first, mask=is_input[:, None] & is_output[None, :], other=0.0)
        acc = tl.dot(rows, numbers, acc, input_precision="tf32x3")
    if HAS_BIAS:
        # bias: expert, output
        acc += tl.load(bias + expert * outputs + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    # y: row, output
    y_at = y + target.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=asked[:, None] & is_output[None, :])


@triton.jit
def combine_kernel(answers, weights, out, width, PER_TOKEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds up some columns of one row per program, one expert's result after the other."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for place in range(PER_TOKEN):
        # answers: row, place, column
        answer = tl.load(answers + (row * PER_TOKEN + place) * width + column, mask=inside, other=0.0)
        total += tl.load(weights + row * PER_TOKEN + place) * answer.to(tl.float32)
    # out: row, column
    tl.store(out + row * width + column, total, mask=inside)
