"""Adapters that tests make: random ones for a model's shapes, in the files that PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from twostroke.models.adapters.shapes import PROJECTIONS, ProjectionShapes

Tensors = dict[str, npt.NDArray[Any]]
CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_rslora": False, "use_dora": False,
    "target_modules": ["q_proj"], "modules_to_save": None, "task_type": "CAUSAL_LM", "inference_mode": True,
    "base_model_name_or_path": "base", "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True,
}  # fmt: skip
SMALL = ProjectionShapes(
    2,
    {
        "q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8),
        "gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8),
    },
)  # fmt: skip


def tensor_name(layer: int, projection: str, side: str) -> str:
    place = "self_attn" if projection[0] in "qkvo" else "mlp"
    return f"base_model.model.model.layers.{layer}.{place}.{projection}.lora_{side}.weight"


def random_tensors(
    shapes: ProjectionShapes = SMALL,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.3,
    projections: Sequence[str] = PROJECTIONS,
) -> Tensors:
    """`size`: about the norm of a row of the product, relative to that of its input."""
    noise, tensors = np.random.default_rng(seed), {}
    for layer in range(shapes.layers):
        for name in projections:
            inputs, outputs = shapes.sizes[name]
            a = noise.standard_normal((rank, inputs)) / np.sqrt(inputs)
            b = noise.standard_normal((outputs, rank)) * size / np.sqrt(rank)
            tensors[tensor_name(layer, name, "A")] = a.astype(np.float32)
            tensors[tensor_name(layer, name, "B")] = b.astype(np.float32)
    return tensors


def write_adapter(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """Returns the folder. Files are replaced as one, as `mv` would."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    fresh = folder / ".new.safetensors"
    save_file(random_tensors() if tensors is None else tensors, fresh)
    fresh.replace(folder / "adapter_model.safetensors")
    return folder
