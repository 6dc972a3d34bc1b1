"""Operations between matrix products on a device, where every launch counts: norms, also with a residual sum, and the
gated activation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Elementwise(Protocol):
    """Operations on x [rows, width], contiguous, with weights [width] of any dtype. They compute in float32 and return
    the inputs' dtype."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Returns the RMS norm of each row."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of the sum, the sum). The sum is rounded to the dtype before it is normed."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu of the left half of each row times its right half."""


class TorchElementwise:
    """`Elementwise` on any device, with several launches each."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.norm(total, weight, epsilon), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
