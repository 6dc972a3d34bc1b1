"""The pool's bytes as one tensor: what kernels read and write, and transports copy page by page."""

from __future__ import annotations

import torch

from twostroke.kv_cache.memory import PageMemory
from twostroke.models.spec import ModelSpec


def pool_tensor(memory: PageMemory, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[pages + scratch, layers, 2, kv_heads, block, head_dim] over the memory itself, not a copy."""
    flat = torch.from_numpy(memory.data).view(dtype)
    return flat.view(-1, *spec.page_shape(block_size))
