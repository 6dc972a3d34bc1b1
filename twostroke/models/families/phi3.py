"""Phi-3, 3.5 and 4: Llama with fused projections, sliding layers, longrope, partly rotated heads in small models."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_rules, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import read_rope
from twostroke.models.families.tensors import Family, FusedRows
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    return read_like_llama(
        published,
        architecture=PHI3.architecture,
        ropes=(read_rope(published, may_be_partial=True),),
        max_position_embeddings=published.config.max_position_embeddings,
        layer_rules=attention_rules(published),
    )


def _fused(spec: ModelSpec) -> dict[str, FusedRows]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv, gate_up = (q_rows, kv_rows, kv_rows), (spec.intermediate_size,) * 2
    return {
        **{f"self_attn.{name}_proj": FusedRows(1, qkv, index) for index, name in enumerate("qkv")},
        **{f"mlp.{name}_proj": FusedRows(1, gate_up, index) for index, name in enumerate(("gate", "up"))},
    }


PHI3: Final = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    read=_read,
    names={
        **{f"self_attn.{name}_proj": "self_attn.qkv_proj" for name in "qkv"},
        **{f"mlp.{name}_proj": "mlp.gate_up_proj" for name in ("gate", "up")},
    },
    fused=_fused,
)
