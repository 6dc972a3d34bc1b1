"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in some layers, and a shared expert that has a gate."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_rules, read_like_llama
from twostroke.models.families.experts import qwen_experts
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    config = published.config
    return read_like_llama(
        published,
        architecture=QWEN2_MOE.architecture,
        qkv_bias=bool(config.qkv_bias),
        layer_rules=attention_rules(published),
        **qwen_experts(published, shared_width=config.shared_expert_intermediate_size),
    )


QWEN2_MOE: Final = Family(architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", read=_read)
