"""DeepSeek V2 and V2-Lite: latents, and experts by a softmax, in some models only those of a token's best groups."""

from __future__ import annotations

from typing import Any, Final

from twostroke.models.families.common import read_like_llama
from twostroke.models.families.latents import NAMES, deepseek_experts, expert_groups, latent_attention
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    published.require("norm_topk_prob", False)
    published.require("scoring_func", "softmax")
    return read_like_llama(
        published,
        architecture=DEEPSEEK_V2.architecture,
        **latent_attention(published, is_interleaved=True),
        **deepseek_experts(published, is_normalised=False, **_groups(published)),
    )


def _groups(published: PublishedConfig) -> dict[str, Any]:
    published.require("topk_method", "greedy", "group_limited_greedy")
    return {} if published.config.topk_method == "greedy" else expert_groups(published, best=1)


DEEPSEEK_V2: Final = Family(architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", read=_read, names=NAMES)
