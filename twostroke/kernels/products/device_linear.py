"""Matrix products of a model on a device: torch multiplies plain numbers, and kernels multiply codes without expanding
them first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from twostroke.kernels.activation import GATED_SILU, Activation
from twostroke.kernels.products.device_codes import CodeProducts, DeviceMatrix
from twostroke.kernels.products.elementwise import Elementwise
from twostroke.kernels.products.linear import (
    ActivatedProduct,
    Adjust,
    ExactLinear,
    Linear,
    PlainLinear,
    activated,
    unchanged,
)
from twostroke.kernels.products.stored import Matrix, StoredMatrix, Weight, can_stack, stacked


class DeviceLinears:
    """Makes matrix products on one device with the given kernels."""

    def __init__(self, device: torch.device, elementwise: Elementwise, codes: CodeProducts) -> None:
        self._device = device
        self._elementwise = elementwise
        self._codes = codes

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Raises ConfigError for codes that cannot be read."""
        if isinstance(weight, torch.Tensor):
            return PlainLinear(weight, bias)
        parts = [
            DeviceMatrix.of(part, self._device) if isinstance(part, StoredMatrix) else part for part in _joined(weight)
        ]
        return CodedLinear(parts, bias, self._codes)

    def exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return ExactLinear(PlainLinear(weight.float(), None if bias is None else bias.float()))

    def activated(self, weight: Weight, bias: torch.Tensor | None, activation: Activation) -> ActivatedProduct:
        """Raises ConfigError for codes that cannot be read."""
        return DeviceActivated(self.linear(weight, bias), activation, self._elementwise)


class CodedLinear:
    """A product with stacked matrices, at least one of which is quantised."""

    def __init__(
        self, parts: Sequence[DeviceMatrix | torch.Tensor], bias: torch.Tensor | None, codes: CodeProducts
    ) -> None:
        self._parts = parts
        self._rows = [part.outputs if isinstance(part, DeviceMatrix) else len(part) for part in parts]
        self._biases = [None] * len(parts) if bias is None else bias.split_with_sizes(self._rows)
        self._codes = codes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), sum(self._rows))
        for part, bias, out in zip(self._parts, self._biases, y.split_with_sizes(self._rows, dim=1), strict=True):
            if isinstance(part, DeviceMatrix):
                self._codes.product(x, part, bias, out)
            else:
                out.copy_(functional.linear(x, part, bias))
        return y


class DeviceActivated:
    def __init__(self, product: Linear, activation: Activation, elementwise: Elementwise) -> None:
        self._product = product
        self._activation = activation
        self._elementwise = elementwise

    def __call__(self, x: torch.Tensor, adjust: Adjust = unchanged) -> torch.Tensor:
        return between(adjust(x, self._product(x)), self._activation, self._elementwise)


def between(y: torch.Tensor, activation: Activation, elementwise: Elementwise) -> torch.Tensor:
    """Returns the activated outputs of a first product."""
    return elementwise.silu_mul(y) if activation == GATED_SILU else activated(y, activation)


def _joined(parts: Sequence[Matrix]) -> Iterator[Matrix]:
    """Yields the parts, with neighbours of one layout merged into one matrix, so that they take one launch."""
    groups: list[list[Matrix]] = []
    for part in parts:
        if groups and can_stack(groups[-1][0], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    for group in groups:
        coded = [part for part in group if isinstance(part, StoredMatrix)]
        plain = [part for part in group if isinstance(part, torch.Tensor)]
        yield stacked(coded) if coded else torch.cat(plain)
