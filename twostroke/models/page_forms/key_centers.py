"""The centers of a model's keys: what is subtracted from them before one scale per token and head stores them.

Softmax does not change when all keys of a head lose the same vector. So attention over keys without their centers
needs no correction, and a scale is not spent on what all keys share. That is the bias of their projection, where a
model has one: channels that positions rotate slowly keep most of it.
"""

from __future__ import annotations

import torch

from twostroke.models.rope import mean_rotation
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensors import WeightSource


def key_centers(source: WeightSource, spec: ModelSpec) -> torch.Tensor | None:
    """Returns float32 [layers, kv_heads, head_dim] in host memory; None where keys have no bias that only rope changes.

    They are rounded to bfloat16, so that no machine's last bits of a mean change a page. Raises what the source raises.
    """
    if not spec.has_key_bias:
        return None
    rows = spec.kv_heads * spec.head_dim
    names = [f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(spec.layers)]
    biases = torch.stack([source.take(name, rows) for name in names]).cpu().double()
    centers = mean_rotation(biases.view(spec.layers, spec.kv_heads, spec.head_dim), spec.ropes, spec.rules)
    return centers.bfloat16().float()
