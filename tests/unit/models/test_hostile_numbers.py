"""Numbers of a config.json that no model can be made of are refused in one line, by their key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.family_configs import CONFIGS
from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.models.registry import read_spec

COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
LATENTS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")


@pytest.mark.parametrize("value", [0, -1, 10**12, 2.5, math.nan, "8", [8], True])
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v2, lite"])
def test_sizes_that_are_none_are_refused_by_their_key(name: str, value: object, tmp_path: Path) -> None:
    raw: dict[str, Any] = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    for key in (*COUNTS, "max_position_embeddings", *(LATENTS if "latents" in name or "deepseek" in name else ())):
        if key not in raw or (key == "max_position_embeddings" and value == 10**12):
            continue
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}), encoding="utf-8")
        with pytest.raises((ConfigError, UnsupportedModel), match=key) as refused:
            read_spec(tmp_path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3", "rms_norm_eps", math.nan),
        ("gemma3", "query_pre_attn_scalar", 0),
        ("gemma3", "sliding_window", 0),
        ("gemma3", "sliding_window", -1),
        ("gemma3", "num_key_value_heads", 3),
        ("gemma2", "attn_logit_softcapping", math.nan),
        ("deepseek_v2, lite", "routed_scaling_factor", math.inf),
        ("deepseek_v2, lite", "first_k_dense_replace", -1),
        ("deepseek_v2, lite", "n_shared_experts", -1),
        ("gpt_oss", "swiglu_limit", 0.0),
    ],
)
def test_numbers_that_would_give_wrong_answers_are_refused_by_their_key(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    raw: dict[str, Any] = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}), encoding="utf-8")
    with pytest.raises((ConfigError, UnsupportedModel), match=key):
        read_spec(tmp_path)
