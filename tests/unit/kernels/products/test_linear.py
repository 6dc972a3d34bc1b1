"""Packed products equal torch's own, for every dtype that we serve."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from twostroke.kernels.products.linear import PlainLinear, make_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_equal_torch(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(48, 80, generator=random) / 9, torch.randn(rows, 80, generator=random)
    bias = torch.randn(48, generator=random)
    weight, x, bias = weight.to(dtype), x.to(dtype), bias.to(dtype)
    y = make_linear(weight, bias if has_bias else None)(x)
    expected = functional.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_without_onednn_the_plain_product_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor, batch: int | None) -> torch.Tensor:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    weight = torch.randn(4, 6)
    linear = make_linear(weight)
    assert isinstance(linear, PlainLinear)
    torch.testing.assert_close(linear(torch.ones(2, 6)), weight.sum(dim=1).expand(2, 4))
