"""Norms with their residual sum, and the gated activation, one launch each. Tests compare them with
`TorchElementwise`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SILU_COLUMNS = 1024
"""Columns per program of the gated activation: few enough that the widest layers fill the chip at batch 1."""


class TritonElementwise:
    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        _check(x, weight)
        out = torch.empty_like(x)
        _launch_norm(x, x, weight, x, out, epsilon, has_residual=False)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check(x, weight)
        _check(residual, weight)
        assert x.shape == residual.shape, f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ"
        out, total = torch.empty_like(x), torch.empty_like(x)
        _launch_norm(x, residual, weight, total, out, epsilon, has_residual=True)
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.ndim == 2, f"gate_up must be [rows, 2 * width], got {tuple(gate_up.shape)}"
        assert gate_up.is_contiguous(), f"gate_up must be contiguous, got strides {gate_up.stride()}"
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        silu_mul_kernel[(triton.cdiv(width, SILU_COLUMNS), rows)](
            gate_up, out, width, COLUMNS=SILU_COLUMNS, num_warps=4
        )
        return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert x.ndim == 2, f"x must be [rows, width], got {tuple(x.shape)}"
    assert x.is_contiguous(), f"x must be contiguous, got strides {x.stride()}"
    assert weight.shape == x.shape[1:], f"a weight of {tuple(weight.shape)} for rows of {x.shape[1]}"


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    epsilon: float,
    *,
    has_residual: bool,
) -> None:
    rows, width = x.shape
    padded = triton.next_power_of_2(width)
    add_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        total,
        out,
        width,
        epsilon,
        PADDED=padded,
        HAS_RESIDUAL=has_residual,
        num_warps=norm_warps(padded),
    )


def norm_warps(padded: int) -> int:
    """Returns the warps with which each thread makes two accesses of 16 bytes per tensor."""
    return min(16, max(4, padded // 512))


@triton.jit
def add_norm_kernel(
    x, residual, weight, total, out, width, epsilon, PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):  # fmt: skip
    """Computes one row per program."""
    column = tl.arange(0, PADDED)
    inside = column < width
    # x, residual, total and out alike: row, column
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    # weight: column
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, width, COLUMNS: tl.constexpr):
    """Computes some columns of one row per program."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    # gate: row, column; up: a width further
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    # out: row, column
    tl.store(out + row * width + column, (activated * up).to(out.dtype.element_ty), mask=inside)
