"""Norms, residual sums and the gated product in the interpreter, against their twin in torch."""

from __future__ import annotations

import pytest
import torch

from twostroke.kernels.products.elementwise import TorchElementwise
from twostroke.kernels.triton.elementwise import TritonElementwise

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 1000), (2, 4096)])
def test_each_kernel_equals_its_twin(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(width)
    x, residual, wide = (torch.randn(rows, size).to(dtype) for size in (width, width, 2 * width))
    weight = torch.randn(width).to(dtype)
    mine, twin = TritonElementwise(), TorchElementwise()
    pairs = [
        (mine.norm(x, weight, 1e-5), twin.norm(x, weight, 1e-5)),
        *zip(mine.add_norm(x, residual, weight, 1e-5), twin.add_norm(x, residual, weight, 1e-5), strict=True),
        (mine.silu_mul(wide), twin.silu_mul(wide)),
    ]
    for actual, expected in pairs:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_of_wide_weights_multiply_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 96).to(dtype) for _ in range(2))
    weight = 1 + torch.randn(96) / 512  # which bfloat16 cannot tell from 1
    mine, twin = TritonElementwise(), TorchElementwise()
    actual, expected = mine.norm(x, weight, 1e-5), twin.norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    sums = zip(mine.add_norm(x, residual, weight, 1e-5), twin.add_norm(x, residual, weight, 1e-5), strict=True)
    for ours, theirs in sums:
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_inputs_stay_as_they_were() -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    before = [tensor.clone() for tensor in (x, residual, weight)]
    TritonElementwise().add_norm(x, residual, weight, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), before, strict=True))


def test_wrong_shapes_and_strides_are_refused_before_a_launch() -> None:
    kernels, x, weight = TritonElementwise(), torch.randn(4, 64), torch.randn(64)
    with pytest.raises(AssertionError, match="a weight of"):
        kernels.norm(x, torch.randn(32), 1e-5)
    with pytest.raises(AssertionError, match="must be contiguous"):
        kernels.norm(torch.randn(64, 4).T, weight, 1e-5)
    with pytest.raises(AssertionError, match="differ"):
        kernels.add_norm(x, torch.randn(3, 64), weight, 1e-5)
    with pytest.raises(AssertionError, match="gate_up must be contiguous"):
        kernels.silu_mul(torch.randn(4, 128)[:, :64])
