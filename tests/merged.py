"""Models with an adapter worked into their weights in float32, by transformers' own names: what its answers must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from twostroke.models.adapters.peft import Adapter


def merged_model(directory: Path, adapter: Adapter) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for (layer, name), part in adapter.parts.items():
        place = "self_attn" if name[0] in "qkvo" else "mlp"
        weight = model.get_submodule(f"model.layers.{layer}.{place}.{name}").weight
        weight.data += adapter.scale * torch.from_numpy(part.b) @ torch.from_numpy(part.a)
    return model.eval()
