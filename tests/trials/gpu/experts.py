"""Products of experts: Triton's kernels against torch expert by expert, and rows alone against rows in company."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.trials.gpu.kernels import WORST, relative_error
from tests.trials.gpu.measure import DEVICE, ON_GPU
from tests.trials.gpu.report import Report, Row
from twostroke.kernels.products.grouped import RoutedPairs, TorchGrouped
from twostroke.kernels.triton.grouped import TritonGrouped

SHAPES = (
    [(dtype, rows, 128, 8, 2048, 768) for dtype in (torch.bfloat16, torch.float32) for rows in (1, 64, 2048)]
    + [(torch.bfloat16, 512, 8, 2, 4096, 14336), (torch.float16, 300, 60, 4, 2048, 1408)]
    if ON_GPU
    else [(torch.float32, 40, 5, 2, 48, 40)]
)
"""Rows, experts, experts of a row, inputs, width: Qwen3-30B-A3B, Mixtral, Qwen1.5-MoE."""


def check_experts(_report: Report) -> Iterator[Row]:
    for dtype, rows, experts, per_token, hidden, width in SHAPES:
        draw = torch.Generator(DEVICE).manual_seed(rows)

        def normal(*shape: int, draw: torch.Generator = draw, dtype: torch.dtype = dtype) -> torch.Tensor:
            numbers = torch.empty(shape, dtype=dtype, device=DEVICE).normal_(generator=draw)
            return numbers.mul_(shape[-1] ** -0.5)

        x, inner, down = normal(rows, hidden), normal(experts, 2 * width, hidden), normal(experts, hidden, width)
        ranks = torch.rand(rows, experts, device=DEVICE, generator=draw)
        chosen = ranks.argsort(dim=1)[:, :per_token].sort(dim=1).values
        weights = torch.rand(rows, per_token, device=DEVICE, generator=draw)
        together, right = (
            mixed(products, x, inner, down, chosen, weights) for products in (TritonGrouped(), TorchGrouped())
        )
        error = relative_error(together, right)
        own = slice(rows // 2, rows // 2 + 1)
        alone = mixed(TritonGrouped(), x[own], inner, down, chosen[own], weights[own])
        # the interpreter multiplies as numpy does, whose bits depend on a row's place
        is_same = not ON_GPU or torch.equal(alone, together[own])
        what = f"{rows} rows, {per_token} of {experts} experts of {width}, {dtype}"
        found = f"{error:.1e}{'' if is_same else ', a row alone has other bits'}"
        yield Row(what, found, None, f"<= {WORST[dtype]:.0e}", error <= WORST[dtype] and is_same)


def mixed(
    products: TritonGrouped | TorchGrouped,
    x: torch.Tensor,
    inner: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    pairs = RoutedPairs.of(chosen, len(inner))
    gate, up = products.gathered(x, inner, None, pairs).chunk(2, dim=-1)
    return products.combined(products.scattered(torch.sigmoid(gate) * up, down, None, pairs), weights)
