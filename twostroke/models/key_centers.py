"""The centers of a model's keys: what is subtracted from them before one scale per token and head stores them.

Softmax does not change when all keys of a head lose the same vector. So attention over keys without their centers
needs no correction, and a scale is not spent on what all keys share. That is the bias of their projection, where a
model has one: channels that positions rotate slowly keep most of it.
"""

from __future__ import annotations

from typing import Final

import torch

from twostroke.models.device_weights import WeightSource
from twostroke.models.rope import rope_tables
from twostroke.models.spec import ModelSpec

POSITIONS: Final = 4096
"""Positions over which the rotated bias is averaged."""


def key_centers(source: WeightSource, spec: ModelSpec) -> torch.Tensor | None:
    """Return float32 [layers, kv_heads, head_dim] in host memory; None where keys have no bias that rope alone changes.

    They are rounded to bfloat16, so that no machine's last bits of a mean change a page. Raises what the source raises.
    """
    if not spec.qkv_bias or spec.qk_norm:
        return None
    rows = spec.kv_heads * spec.head_dim
    names = [f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(spec.layers)]
    biases = torch.stack([source.take(name, rows) for name in names]).cpu().double()
    low, high = biases.view(spec.layers, spec.kv_heads, spec.head_dim).chunk(2, dim=-1)
    cosines, sines = (table.double().mean(0) for table in rope_tables(spec.rope, POSITIONS))
    centers = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
    return centers.bfloat16().float()
