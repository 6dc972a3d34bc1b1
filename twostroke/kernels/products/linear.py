"""Matrix products with fixed weights. They are packed once for this CPU where oneDNN can, which halves the time of a
decode step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch
from torch.nn import functional

from twostroke.kernels.activation import Activation
from twostroke.kernels.products.stored import Weight, plain

FUNCTIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}
"""The functions of `activation.ACTIVATIONS`."""


class Linear(Protocol):
    """y = x W^T + b for x [rows, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


Adjust = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Changes rows of a product y of x in place, and returns y."""


def unchanged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y


class ActivatedProduct(Protocol):
    """A product with its activation: f(x W^T + b)."""

    def __call__(self, x: torch.Tensor, adjust: Adjust = unchanged) -> torch.Tensor:
        """Computes the product. `adjust` changes its rows before the activation."""


class Linears(Protocol):
    """Makes the matrix products of a model in the form that its kernels need."""

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Makes the product with `weight` [out, in]."""

    def exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Makes the product with a router's `weight`, which is never quantised. Its sums and results are float32."""

    def activated(self, weight: Weight, bias: torch.Tensor | None, activation: Activation) -> ActivatedProduct:
        """Makes the product with its activation, f(x W^T + b). Where it is gated, y has half as many columns."""


class TorchLinears:
    """Makes products that torch computes, on any device."""

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        return make_linear(plain(weight), bias)

    def exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return ExactLinear(make_linear(weight.float(), None if bias is None else bias.float()))

    def activated(self, weight: Weight, bias: torch.Tensor | None, activation: Activation) -> ActivatedProduct:
        return ActivatedLinear(make_linear(plain(weight), bias), activation)


class ExactLinear:
    """A float32 product, whatever the dtype of its rows."""

    def __init__(self, product: Linear) -> None:
        self._product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x.float())


class ActivatedLinear:
    def __init__(self, product: Linear, activation: Activation) -> None:
        self._product = product
        self._activation = activation

    def __call__(self, x: torch.Tensor, adjust: Adjust = unchanged) -> torch.Tensor:
        return activated(adjust(x, self._product(x)), self._activation)


def activated(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns the activation of a product's columns, which are all gates, then all values where it is gated."""
    function = FUNCTIONS[activation.function]
    if not activation.is_gated:
        return function(y)
    gate, value = y.chunk(2, dim=-1)
    if activation.clamp is None:
        return function(gate) * value
    alpha, limit = activation.clamp.alpha, activation.clamp.limit
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return (value + 1) * (gate * torch.sigmoid(gate * alpha))


class PlainLinear:
    """A product with the weight in its original order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A product with the weight reordered for oneDNN. Raises RuntimeError where oneDNN has no kernel for the dtype on
    this CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y


class WidenedLinear:
    """A float32 product for float16 weights: where a CPU has no float16 kernel, torch's own is ten times slower."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._product = make_linear(weight.float(), bias if bias is None else bias.float())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x.float()).half()


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Returns the fastest product that this machine has for `weight` [out, in]."""
    if weight.device.type != "cpu":
        return PlainLinear(weight, bias)
    try:
        packed = PackedLinear(weight, bias)
        packed(weight.new_zeros(1, weight.shape[1]))
    except (RuntimeError, AttributeError):  # no kernel for this dtype on this CPU, or a torch built without oneDNN
        return WidenedLinear(weight, bias) if weight.dtype == torch.float16 else PlainLinear(weight, bias)
    return packed
