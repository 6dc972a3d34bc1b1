"""Which attention serves a pool: decided once, when the pool is built."""

from __future__ import annotations

from pathlib import Path

import torch

from twostroke.kernels.attention import AttentionBackend
from twostroke.kernels.cpu.attention import DTYPES, NativeAttention
from twostroke.kernels.cpu.build import load_kernels
from twostroke.kernels.torch_attention import TorchAttention


def choose_attention(pool: torch.Tensor, *, heads: int, scale: float, kernels_dir: Path) -> AttentionBackend:
    """The native kernel on a CPU where one can be built, else torch. Built libraries are kept in `kernels_dir`."""
    if pool.device.type == "cpu" and pool.dtype in DTYPES:
        library = load_kernels(kernels_dir)
        if library is not None:
            return NativeAttention(pool, heads, scale, library)
    return TorchAttention(pool, heads, scale)
