"""The numbers of a config.json that sizes are made of, checked before anything is made of them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from twostroke.base.errors import ConfigError

MOST: Final = 1 << 24
"""The largest dimension: tens of times those of the largest models, and its vectors still fit into memory."""
MOST_LAYERS: Final = 1 << 12
"""Lists of layers are made before any tensor is looked for."""
COUNTS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, MOST_LAYERS)),
    **dict.fromkeys(
        (
            "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim",
            "intermediate_size", "n_inner", "moe_intermediate_size", "vocab_size", "kv_lora_rank", "q_lora_rank",
            "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        ),
        (1, MOST),
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1 << 31)),
    **dict.fromkeys(
        (
            "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
            "n_group", "topk_group", "first_k_dense_replace", "shared_expert_intermediate_size",
        ),
        (0, MOST),
    ),
}  # fmt: skip
"""Least and most of whole numbers, by their key. A family says more of those that may be 0."""
POSITIVE: Final = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "routed_scaling_factor", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "swiglu_alpha",
)  # fmt: skip
"""Numbers that are more than 0, and finite."""


def check_numbers(raw: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError, naming the key, for a number of config.json that no model can have.

    Keys that are missing or null are left to the family.
    """
    for key, (least, most) in COUNTS.items():
        value = raw.get(key)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise ConfigError(
                f"{path}: {key} must be a whole number from {least} to {most}, got {value!r:.60}", field="model"
            )
    for key in POSITIVE:
        value = raw.get(key)
        if value is not None and not (type(value) in {int, float} and 0 < value < math.inf):
            raise ConfigError(f"{path}: {key} must be a finite number above 0, got {value!r:.60}", field="model")
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})",
            field="model",
        )
