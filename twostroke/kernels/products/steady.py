"""Products of torch with rows that depend on nothing but themselves: not on their neighbours, nor on how many there
are.

A library picks its order of summation by the number of rows. Here it only ever sees tiles of a few fixed sizes, the
last one padded; which sizes agree to the bit on this machine is tried when a weight is loaded.
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
"""Rows of a tile. The first is always used: it costs what one row does, where weights must be read anyway."""

UNDIVIDED: Final = 32_768
"""Elements below which torch leaves an elementwise operation to one thread: one cut by threads has other last bits."""


class SteadyLinear:
    """`product` in tiles of `sizes` rows, ascending."""

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
    """The activation of a product."""

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
    """Makes steady products. Raises ConfigError where this machine has none."""

    def __init__(self) -> None:
        self._tried: dict[tuple[torch.Size, torch.dtype, bool], tuple[int, ...]] = {}
        """Sizes that agree, by what a library picks its kernel by."""

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> SteadyLinear:
        weight = plain(weight)
        kind = (weight.shape, weight.dtype, bias is not None)
        if kind not in self._tried:
            trial = make_linear(telling_weight(weight), None if bias is None else torch.zeros_like(bias))
            self._tried[kind] = agreeing_sizes(trial, weight.shape[1], weight.dtype)
        return SteadyLinear(make_linear(weight, bias), self._tried[kind])

    def exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ExactLinear:
        return ExactLinear(self.linear(weight.float(), None if bias is None else bias.float()))

    def activated(self, weight: Weight, bias: torch.Tensor | None, activation: Activation) -> SteadyActivated:
        return SteadyActivated(self.linear(weight, bias), len(plain(weight)) // activation.width, activation)


def telling_weight(like: torch.Tensor) -> torch.Tensor:
    """Returns a weight. Its products with `telling_rows` cancel: what is left of a sum is its rounding, which shows the
    order of its terms.

    With ordinary numbers most differences would be lost when a sum is rounded to 16 bits.
    """
    outputs, inputs = like.shape
    noise = torch.Generator().manual_seed(outputs)
    half = torch.randn(inputs // 2, generator=noise)
    row = functional.pad(torch.cat((half, half)), (0, inputs % 2))
    return (torch.randn(outputs, 1, generator=noise) * row).to(like.dtype)


def telling_rows(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    half = torch.randn(count, inputs // 2, generator=torch.Generator().manual_seed(inputs)).to(dtype)
    return functional.pad(torch.cat((half, -half), dim=1), (0, inputs % 2))


def agreeing_sizes(product: Linear, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns those of SIZES whose tiles give a row the same bits, wherever in the tile it is and whatever is beside
    it.

    `product` is of a `telling_weight`. Raises ConfigError where that does not even hold within tiles of the first size.
    """
    first = SIZES[0]
    x = telling_rows(SIZES[-1], inputs, dtype)
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
