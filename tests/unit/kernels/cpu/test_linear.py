"""Products in panels: as exact as oneDNN's or as int8 allows, and a row never feels its neighbours or the threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch.nn import functional

from tests.unit.kernels.variants import VARIANTS
from twostroke.kernels.activation import ACTIVATIONS, Activation
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import NativeLinears
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.cpu.weights.packing import GROUP
from twostroke.kernels.products.linear import activated, make_linear

ROWS = (1, 2, 5, 7, 8, 12, 13, 25, 100, 197)


@pytest.fixture(params=VARIANTS)
def kernels(built_kernels: Mapping[str, Kernels], request: pytest.FixtureRequest) -> Kernels:
    return built_kernels[request.param]


@pytest.fixture
def linears(kernels: Kernels) -> NativeLinears:
    return packer(kernels, None)


@pytest.fixture
def team(kernels: Kernels) -> Iterator[Team]:
    team = Team(kernels, (0, 1, 2))
    yield team
    team.close()


def packer(kernels: Kernels, team: Team | None, *, is_int8: bool = False) -> NativeLinears:
    return NativeLinears(kernels, team, is_int8=is_int8)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 2), (32, 7), (33, 80), (160, 576), (97, 333)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_as_exact_as_those_of_torch(
    linears: NativeLinears, outputs: int, inputs: int, has_bias: bool
) -> None:
    weight, bias = numbers(outputs, inputs), numbers(outputs, seed=1) if has_bias else None
    ours, theirs = linears.linear(weight, bias), make_linear(weight, bias)
    for rows in ROWS:
        x = numbers(rows, inputs, seed=rows)
        truth = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        error = (ours(x) - truth).abs()
        assert error.mean() <= (theirs(x) - truth).abs().mean() * 1.01
        torch.testing.assert_close(ours(x).double(), truth, rtol=2**-8, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (16, 64), (40, 130), (200, 96)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gates_let_values_through(linears: NativeLinears, outputs: int, inputs: int, has_bias: bool) -> None:
    weight, bias = numbers(2 * outputs, inputs), numbers(2 * outputs, seed=1) if has_bias else None
    product = linears.activated(weight, bias, Activation())
    for rows in ROWS:
        x = numbers(rows, inputs, seed=rows)
        sums = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        truth = functional.silu(sums[:, :outputs]) * sums[:, outputs:]
        torch.testing.assert_close(product(x).double(), truth, rtol=2**-7.9, atol=1e-5 * inputs)


@pytest.mark.parametrize("function", ACTIVATIONS)
@pytest.mark.parametrize("is_gated", [True, False])
def test_activations_are_those_of_torch(linears: NativeLinears, function: str, is_gated: bool) -> None:
    activation = Activation(function, is_gated)
    weight, bias = numbers(40 * activation.width, 130), numbers(40 * activation.width, seed=1)
    x = numbers(33, 130, seed=2) / 4
    sums = functional.linear(x.double(), weight.double(), bias.double())
    y = linears.activated(weight, bias, activation)(x)
    torch.testing.assert_close(y.double(), activated(sums, activation), rtol=2**-7.9, atol=1e-5)


def test_gates_that_are_shut_or_wide_open_give_numbers(linears: NativeLinears) -> None:
    weight = torch.tensor([[1.0]] * 16 + [[0.0]] * 16).bfloat16()
    gates = torch.tensor([[-1e30], [-200.0], [-90.0], [90.0], [1e30]]).bfloat16()
    y = linears.activated(weight, torch.cat([torch.zeros(16), torch.ones(16)]).bfloat16(), Activation())(gates)
    assert y[:3].abs().max() < 1e-30
    assert torch.equal(y[3:], gates[3:].expand(2, 16))


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_row_is_the_same_bits_beside_any_neighbours_and_on_any_threads(
    kernels: Kernels, team: Team, is_int8: bool
) -> None:
    weight, x = numbers(210, 3 * GROUP), numbers(max(ROWS), 3 * GROUP)
    alone = packer(kernels, None, is_int8=is_int8).linear(weight)
    shared = packer(kernels, team, is_int8=is_int8).linear(weight)
    row_by_row = torch.cat([alone(row[None]) for row in x])
    for rows in ROWS:
        assert torch.equal(alone(x[:rows]), row_by_row[:rows])
        with team.step():
            assert torch.equal(shared(x[-rows:]), row_by_row[-rows:])


@pytest.mark.parametrize("is_int8", [False, True])
def test_rows_may_lie_apart_and_columns_too(kernels: Kernels, is_int8: bool) -> None:
    product = packer(kernels, None, is_int8=is_int8).linear(numbers(64, GROUP))
    x = numbers(9, 2 * GROUP)
    expected = product(x[:, :GROUP].contiguous())
    assert torch.equal(product(x[:, :GROUP]), expected)
    assert torch.equal(product(x[:, :GROUP].t().contiguous().t()), expected)


@pytest.mark.parametrize("has_bias", [True, False])
def test_int8_products_of_what_int8_can_hold_are_exact(kernels: Kernels, has_bias: bool) -> None:
    inputs, outputs = 5 * GROUP, 77
    weight, bias = steps_of_64th(outputs, inputs), numbers(outputs) if has_bias else None
    product = packer(kernels, None, is_int8=True).linear(weight, bias)
    for rows in ROWS:
        x = steps_of_64th(rows, inputs)
        x[0, :GROUP] = 0  # a group without a scale
        truth = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(product(x).double(), truth, rtol=2**-8, atol=1e-3)


def test_int8_products_of_anything_are_near(kernels: Kernels) -> None:
    weight, x = numbers(77, 5 * GROUP), numbers(50, 5 * GROUP, seed=1)
    truth = functional.linear(x.double(), weight.double())
    error = packer(kernels, None, is_int8=True).linear(weight)(x) - truth
    assert error.square().mean().sqrt() < 0.015 * truth.std()


def test_int8_weights_of_odd_width_stay_bfloat16(kernels: Kernels) -> None:
    weight, x = numbers(40, GROUP + 2), numbers(3, GROUP + 2, seed=1)
    int8, exact = (packer(kernels, None, is_int8=is_int8).linear(weight) for is_int8 in (True, False))
    assert torch.equal(int8(x), exact(x))


def steps_of_64th(rows: int, inputs: int) -> torch.Tensor:
    """Multiples of 1/64 up to 127/64, which each group reaches, so that 1/64 is its scale."""
    steps = torch.randint(-127, 128, (rows, inputs), generator=torch.Generator().manual_seed(rows))
    steps[:, ::GROUP] = 127
    return (steps / 64).bfloat16()
