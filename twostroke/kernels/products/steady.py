"""Matrix products of torch whose rows do not depend on other rows or on their number.

A library chooses its order of summation by the number of rows. Here it only gets tiles of a few fixed sizes, the last
one padded. The sizes that agree to the bit on this machine are found when a weight is loaded.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from twostroke.base.errors import ConfigError
from twostroke.kernels.activation import Activation
from twostroke.kernels.products.linear import Adjust, ExactLinear, Linear, activated, make_linear, unchanged
from twostroke.kernels.products.stored import Weight, plain

SIZES: Final = (4, 16, 64)
"""Numbers of rows of tiles. The first is always used: it costs as much as one row, since the weights are read anyway.
"""

UNDIVIDED: Final = 32_768
"""Number of elements from which torch divides an elementwise operation among threads, which gives other last bits."""


class SteadyLinear:
    """Computes `product` in tiles of `sizes` rows, which are ascending."""

    def __init__(self, product: Linear, sizes: tuple[int, ...]) -> None:
        self._product = product
        self._sizes = sizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts, done = [], 0
        for size in reversed(self._sizes):
            while len(x) - done >= size:
                parts.append(self._product(x[done : done + size]))
                done += size
        left = len(x) - done
        if left:
            padding = (0, 0, 0, self._sizes[0] - left)
            parts.append(self._product(functional.pad(x[done:], padding))[:left])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SteadyActivated:
    """A product with its activation, in pieces that torch computes on one thread."""

    def __init__(self, product: Linear, outputs: int, activation: Activation) -> None:
        self._product = product
        self._activation = activation
        self._rows = max(1, (UNDIVIDED - 1) // outputs)

    def __call__(self, x: torch.Tensor, adjust: Adjust = unchanged) -> torch.Tensor:
        y = adjust(x, self._product(x))
        firsts = range(0, len(y), self._rows)
        parts = [activated(y[first : first + self._rows], self._activation) for first in firsts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SteadyLinears:
    """Makes products of this kind. Raises ConfigError where this machine has none."""

    def __init__(self) -> None:
        self._tried: dict[tuple[torch.Size, torch.dtype, bool], tuple[int, ...]] = {}
        """Sizes of tiles that agree, by the properties by which a library chooses its kernel."""

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> SteadyLinear:
        weight = plain(weight)
        kind = (weight.shape, weight.dtype, bias is not None)
        if kind not in self._tried:
            trial = make_linear(cancelling_weight(weight), None if bias is None else torch.zeros_like(bias))
            self._tried[kind] = agreeing_sizes(trial, weight.shape[1], weight.dtype)
        return SteadyLinear(make_linear(weight, bias), self._tried[kind])

    def exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ExactLinear:
        return ExactLinear(self.linear(weight.float(), None if bias is None else bias.float()))

    def activated(self, weight: Weight, bias: torch.Tensor | None, activation: Activation) -> SteadyActivated:
        return SteadyActivated(self.linear(weight, bias), len(plain(weight)) // activation.width, activation)


def cancelling_weight(like: torch.Tensor) -> torch.Tensor:
    """Returns a weight whose products with `cancelling_rows` cancel. What is left of a sum is its rounding error, which
    depends on the order of its terms.

    With ordinary numbers most differences would be lost when a sum is rounded to 16 bits.
    """
    outputs, inputs = like.shape
    noise = torch.Generator().manual_seed(outputs)
    half = torch.randn(inputs // 2, generator=noise)
    row = functional.pad(torch.cat((half, half)), (0, inputs % 2))
    return (torch.randn(outputs, 1, generator=noise) * row).to(like.dtype)


def cancelling_rows(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    half = torch.randn(count, inputs // 2, generator=torch.Generator().manual_seed(inputs)).to(dtype)
    return functional.pad(torch.cat((half, -half), dim=1), (0, inputs % 2))


def agreeing_sizes(product: Linear, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns those of SIZES whose tiles give a row the same bits at every position in a tile and beside any other
    rows.

    `product` has a `cancelling_weight`. Raises ConfigError where that does not even hold within tiles of the first
    size.
    """
    first = SIZES[0]
    x = cancelling_rows(SIZES[-1], inputs, dtype)
    steady = SteadyLinear(product, SIZES[:1])
    expected = steady(x)
    few = x[: 2 * first]
    if not all(
        torch.equal(steady(few.roll(shift, 0)).roll(-shift, 0), expected[: 2 * first]) for shift in range(first)
    ):
        raise ConfigError(
            "--deterministic cannot be kept on this machine: its matrix products give a row other bits in another "
            "place; use --dtype bfloat16 with a C++ compiler, or leave --deterministic away",
            field="deterministic",
        )
    return tuple(size for size in SIZES if torch.equal(SteadyLinear(product, (first, size))(x), expected))
