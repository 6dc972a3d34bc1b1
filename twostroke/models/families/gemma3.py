"""Gemma 3, its text models: as Gemma 2, with norms on the heads of q and k, and another rope for sliding layers."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_rules, read_like_llama
from twostroke.models.families.gemma2 import NAMES, gemma_fields
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import read_rope
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    config = published.config
    published.require("attn_logit_softcapping", None)
    return read_like_llama(
        published,
        architecture=GEMMA3.architecture,
        ropes=(read_rope(published, "full_attention"), read_rope(published, "sliding_attention")),
        max_position_embeddings=config.max_position_embeddings,
        qk_norm=True,
        layer_rules=attention_rules(published, scale=config.query_pre_attn_scalar**-0.5, sliding_rope=1),
        **gemma_fields(published),
    )


GEMMA3: Final = Family(architecture="Gemma3ForCausalLM", model_type="gemma3_text", read=_read, names=NAMES)
