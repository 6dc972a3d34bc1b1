"""Which attention serves a pool: decided once, when the pool is built."""

from __future__ import annotations

import torch

from twostroke.kernels.attention import AttentionBackend
from twostroke.kernels.cpu.attention import DTYPES, NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.torch_attention import TorchAttention


def choose_attention(
    pool: torch.Tensor, *, heads: int, scale: float, kernels: Kernels | None, team: Team | None = None
) -> AttentionBackend:
    """Triton on CUDA; the native kernel on a CPU that has one (`load_kernels`), on threads of `team`; else torch."""
    if pool.device.type == "cuda":
        # only here: a machine without CUDA need not have Triton
        from twostroke.kernels.triton.attention import TritonAttention

        return TritonAttention(pool, heads, scale)
    if kernels is not None and pool.device.type == "cpu" and pool.dtype in DTYPES:
        return NativeAttention(pool, heads, scale, kernels, team)
    return TorchAttention(pool, heads, scale)
