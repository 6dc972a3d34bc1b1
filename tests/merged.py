"""Models with an adapter worked into their weights in float32, by transformers' own names: what its answers must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from twostroke.models.adapters.peft import Adapter
from twostroke.models.adapters.shapes import FUSED


def merged_model(directory: Path, adapter: Adapter) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for (layer, name), part in adapter.parts.items():
        rows_of(model, layer, name).add_(adapter.scale * torch.from_numpy(part.b) @ torch.from_numpy(part.a))
    return model.eval()


def rows_of(model: Any, layer: int, name: str) -> torch.Tensor:
    """Returns the rows of a projection's weight, which a checkpoint may hold in a larger matrix with others."""
    place = "self_attn" if name[0] in "qkvo" else "mlp"
    modules = model.get_submodule(f"model.layers.{layer}.{place}")
    if hasattr(modules, name):
        own: torch.Tensor = modules.get_submodule(name).weight.data
        return own
    fused = next(each for each, names in FUSED.items() if name in names)
    weight: torch.Tensor = modules.get_submodule(fused).weight.data
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_rows = config.num_key_value_heads * head_dim
    sizes = [config.num_attention_heads * head_dim, kv_rows, kv_rows] if place == "self_attn" else len(weight) // 2
    parts: tuple[torch.Tensor, ...] = torch.split(weight, sizes)
    return parts[FUSED[fused].index(name)]
