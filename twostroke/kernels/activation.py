"""What comes between the first and the last product of an MLP. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ACTIVATIONS: Final = ("silu", "gelu_tanh", "gelu")
"""Functions by name: x / (1 + e^-x), GELU by its tanh approximation, and GELU by the error function."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """Numbers of y = gate / (1 + e^(-alpha * gate)) * (value + 1), where gates and values are clamped before."""

    alpha: float
    limit: float
    """What gates are at most, and values at most and at least, with a minus."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of the first product, which is either all there is, or lets the values of another one through."""

    function: str = "silu"
    """A name among `ACTIVATIONS`."""
    is_gated: bool = True
    """Whether the product's outputs are all gates, then all values: y = function(gate) * value."""
    clamp: Clamp | None = None
    """What makes of silu the activation of gpt-oss."""

    @property
    def width(self) -> int:
        """Outputs of the product for each output of the activation."""
        return 2 if self.is_gated else 1


GATED_SILU: Final = Activation()
"""What Llama and most of its kind have."""
