"""Products with weights in a file's form: exact but for float32's rounding, and a row depends on nothing beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch.nn import functional

from tests.unit.kernels.stored_matrices import FP8, LAYOUTS, rounded, stored
from tests.unit.kernels.variants import VARIANTS
from twostroke.kernels.activation import GATED_SILU
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import NativeLinears
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.cpu.weights.arena import PrivateArena
from twostroke.kernels.cpu.weights.packing import stored_bytes
from twostroke.kernels.cpu.weights.stored_packing import PackedMatrix
from twostroke.kernels.products.stored import StoredMatrix, StoredNumbers

INPUTS = 512
ROWS = (1, 2, 3, 4, 7, 12, 25, 100)


@pytest.fixture(params=VARIANTS)
def kernels(built_parts: Mapping[str, Kernels], request: pytest.FixtureRequest) -> Kernels:
    return built_parts[request.param]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_the_same_numbers(kernels: Kernels, name: str, has_bias: bool) -> None:
    matrix, bias = stored(LAYOUTS[name], 75, INPUTS), numbers(75, seed=1) if has_bias else None
    product = NativeLinears(kernels, None).linear((matrix,), bias)
    x = numbers(max(ROWS), INPUTS)
    x[1, :64] = 0  # units without a scale
    truth = rounded(x, matrix.layout.unit) @ matrix.dense().double().T
    if bias is not None:
        truth += bias.double()
    spread = float(truth.std())
    torch.testing.assert_close(product(x).double(), truth, rtol=2**-8, atol=1e-5 * spread)
    for rows in ROWS:
        assert torch.equal(product(x[:rows]), product(x)[:rows])


@pytest.mark.parametrize("name", LAYOUTS)
def test_gates_let_values_through(kernels: Kernels, name: str) -> None:
    gate, up = (stored(LAYOUTS[name], 40, INPUTS, seed) for seed in (1, 2))
    x = numbers(9, INPUTS) / 8
    inputs = rounded(x, gate.layout.unit)
    truth = functional.silu(inputs @ gate.dense().double().T) * (inputs @ up.dense().double().T)
    y = NativeLinears(kernels, None).activated((gate, up), None, GATED_SILU)(x)
    torch.testing.assert_close(y.double(), truth, rtol=2**-7, atol=1e-5 * float(truth.std()))


WITH_PAIRS = frozenset({"amx", "avx512_bf16", "neon_bf16"})
"""Builds whose instructions multiply bfloat16: they make FP8 so."""


@pytest.mark.parametrize("spread", [20, 0.004])
@pytest.mark.parametrize("group", [128, 384, INPUTS])
def test_fp8_is_multiplied_exact_or_as_the_bfloat16_that_it_stands_for(
    kernels: Kernels, group: int, spread: float
) -> None:
    """Numbers below 2^-6, most of those of the smaller spread, have no exponent of their own."""
    draw, layout = torch.Generator().manual_seed(group), dataclasses.replace(FP8, group=group)
    codes = (torch.randn(75, INPUTS, generator=draw) * spread).to(torch.float8_e4m3fn)
    content = StoredNumbers(codes, torch.rand(75, layout.groups(INPUTS), generator=draw) * 0.02)
    matrix, linears = StoredMatrix(layout, 75, INPUTS, lambda: content), NativeLinears(kernels, None)
    product, x = linears.linear((matrix,)), numbers(max(ROWS), INPUTS)
    together = product(x)
    if kernels.variant in WITH_PAIRS:
        assert torch.equal(together, linears.linear(matrix.dense().bfloat16())(x))
    else:
        truth = x.double() @ matrix.dense().double().T
        torch.testing.assert_close(together.double(), truth, rtol=2**-8, atol=1e-5 * float(truth.std()))
    for rows in ROWS:
        assert torch.equal(product(x[:rows]), together[:rows])


def test_matrices_of_several_layouts_are_one_product(kernels: Kernels) -> None:
    parts = [stored(LAYOUTS[name], rows, INPUTS) for name, rows in (("Q4_K", 64), ("Q4_K", 20), ("Q6_K", 33))]
    plain, bias = numbers(7, INPUTS), numbers(124, seed=3)
    linears = NativeLinears(kernels, None)
    x = numbers(5, INPUTS)
    expected = torch.cat(
        [linears.linear((part,), own)(x) for part, own in zip(parts, bias.split([64, 20, 33, 7]), strict=False)]
        + [linears.linear(plain, bias[117:])(x)],
        dim=1,
    )
    assert torch.equal(linears.linear((*parts, plain), bias)(x), expected)


def test_factors_of_rows_change_no_rounding(kernels: Kernels) -> None:
    matrix = stored(LAYOUTS["Q4_1"], 48, INPUTS)
    factors = torch.exp2(torch.arange(48) % 7 - 3.0)
    linears, x = NativeLinears(kernels, None), numbers(6, INPUTS)
    scaled = linears.linear((matrix.scaled(factors),))(x)
    assert torch.equal(scaled.float(), linears.linear((matrix,))(x).float() * factors)
    assert torch.equal(matrix.scaled(factors).dense(), matrix.dense() * factors[:, None])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_threads_change_no_bits(kernels: Kernels, name: str) -> None:
    matrix, x = stored(LAYOUTS[name], 400, INPUTS), numbers(40, INPUTS)
    alone = NativeLinears(kernels, None).linear((matrix,))
    team = Team(kernels, (0, 1, 2))
    shared = NativeLinears(kernels, team).linear((matrix,))
    with team.step():
        for rows in (1, 40):
            assert torch.equal(shared(x[:rows]), alone(x[:rows]))
    team.close()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bill_knows_the_bytes_of_a_packed_matrix(name: str, is_gated: bool) -> None:
    class Counting(PrivateArena):
        total = 0

        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            self.total += -(-tensor.numel() // 64) * 64
            return super().copy(tensor)

    arena = Counting()
    PackedMatrix(stored(LAYOUTS[name], 90, INPUTS), arena, is_gated=is_gated)
    assert arena.total == stored_bytes(90, INPUTS, LAYOUTS[name], is_gated=is_gated)
