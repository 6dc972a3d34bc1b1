"""DeepSeek V3 and R1: latents, and experts by sigmoids, chosen with a correction from a token's best groups."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import read_like_llama
from twostroke.models.families.latents import NAMES, deepseek_experts, expert_groups, latent_attention
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    """Layers that predict further tokens (num_nextn_predict_layers) lie behind the model's own, and are not read."""
    config = published.config
    published.require("scoring_func", "sigmoid")
    published.require("topk_method", "noaux_tc")
    return read_like_llama(
        published,
        architecture=DEEPSEEK_V3.architecture,
        **latent_attention(published, is_interleaved=bool(config.rope_interleave)),
        **deepseek_experts(
            published,
            is_sigmoid=True,
            is_normalised=bool(config.norm_topk_prob),
            **expert_groups(published, best=2),
        ),
    )


DEEPSEEK_V3: Final = Family(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", read=_read, names=NAMES)
