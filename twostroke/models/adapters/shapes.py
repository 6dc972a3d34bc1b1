"""The projections of a dense decoder that an adapter may change, and their sizes in one model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twostroke.models.spec import ModelSpec

PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections that some checkpoints store as one, with their rows in this order."""


@dataclass(frozen=True, slots=True)
class ProjectionShapes:
    layers: int
    sizes: Mapping[str, tuple[int, int]]
    """(inputs, outputs) of each of PROJECTIONS."""

    @classmethod
    def of(cls, spec: ModelSpec) -> ProjectionShapes:
        heads = (spec.heads, spec.kv_heads, spec.head_dim)
        return cls(spec.layers, _sizes(spec.hidden_size, *heads, spec.intermediate_size))

    @classmethod
    def of_directory(cls, directory: Path) -> ProjectionShapes | None:
        """Returns the sizes in a model's config.json; None where it does not have them under the usual keys.

        Routers know no more of a model; workers check what they load by the model's spec.
        """
        try:
            config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            sizes = _sizes(hidden, heads, kv_heads, head_dim, int(config["intermediate_size"]))
            return cls(int(config["num_hidden_layers"]), sizes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
            return None


def _sizes(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> Mapping[str, tuple[int, int]]:
    q, kv = heads * head_dim, kv_heads * head_dim
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
