"""Qwen3-MoE: Qwen3 with experts in some layers, or in all."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_bias, attention_rules, read_like_llama
from twostroke.models.families.experts import qwen_experts
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    return read_like_llama(
        published,
        architecture=QWEN3_MOE.architecture,
        qk_norm=True,
        layer_rules=attention_rules(published),
        **attention_bias(published),
        **qwen_experts(published),
    )


QWEN3_MOE: Final = Family(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", read=_read)
