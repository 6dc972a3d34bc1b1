"""The activation between the first and the last matrix product of an MLP. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ACTIVATIONS: Final = ("silu", "gelu_tanh", "gelu")
"""Functions by name: x / (1 + e^-x), GELU by its tanh approximation, and GELU by the error function."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """Constants of y = gate / (1 + e^(-alpha * gate)) * (value + 1), where gates and values are clamped first."""

    alpha: float
    limit: float
    """Gates are clamped to at most `limit`, values to the range from -limit to limit."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of the first product's outputs. Either it is applied to all of them, or half of them gate the other
    half."""

    function: str = "silu"
    """A name in `ACTIVATIONS`."""
    is_gated: bool = True
    """Whether the product's outputs are first all gates, then all values: y = function(gate) * value."""
    clamp: Clamp | None = None
    """Clamping that turns silu into the activation of gpt-oss."""

    @property
    def width(self) -> int:
        """Outputs of the product for each output of the activation."""
        return 2 if self.is_gated else 1


GATED_SILU: Final = Activation()
"""The activation of Llama and of most similar models."""
