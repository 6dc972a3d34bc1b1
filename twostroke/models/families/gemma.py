"""Gemma 2, and the text models of Gemma 3."""

from __future__ import annotations

from typing import Any, Final

from twostroke.kernels.activation import Activation
from twostroke.models.families.common import attention_bias, attention_rules, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import read_rope
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec

NAMES: Final = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
"""Names of norms in Gemma's files, by ours."""


def gemma_fields(published: PublishedConfig) -> dict[str, Any]:
    """Returns the fields that Gemma 2 and 3 have in common. Raises UnsupportedModel for what is not computed."""
    published.require("use_bidirectional_attention", None, False)
    config = published.config
    return {
        "activation": Activation(published.activation("hidden_activation")),
        "has_wide_norms": True,
        "has_output_norms": True,
        "embedding_scale": config.hidden_size**0.5,
        "final_softcap": config.final_logit_softcapping,
        **attention_bias(published),
    }


def _gemma2(published: PublishedConfig) -> ModelSpec:
    """Returns a decoder with norms around attention and MLP, soft caps on scores and logits, and every other layer
    sliding.
    """
    config = published.config
    rules = attention_rules(published, scale=config.query_pre_attn_scalar**-0.5, softcap=config.attn_logit_softcapping)
    return read_like_llama(published, architecture=GEMMA2.architecture, layer_rules=rules, **gemma_fields(published))


GEMMA2: Final = Family(architecture="Gemma2ForCausalLM", model_type="gemma2", read=_gemma2, names=NAMES)


def _gemma3(published: PublishedConfig) -> ModelSpec:
    """Returns Gemma 2 with norms on the heads of q and k, and another rope for sliding layers."""
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


GEMMA3: Final = Family(architecture="Gemma3ForCausalLM", model_type="gemma3_text", read=_gemma3, names=NAMES)
