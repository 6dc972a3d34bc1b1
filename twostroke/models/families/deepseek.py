"""DeepSeek V2, V3 and R1: latents in place of keys and values, and layers with experts as MLPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from twostroke.kernels.attention.rules import AttentionRule
from twostroke.models.families.common import experts_per_token, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ExpertSpec, LatentSpec, ModelSpec

NORM_EPSILON: Final = 1e-6
"""The epsilon of the norms of latents. Transformers' and DeepSeek's own code use it, whatever rms_norm_eps is."""
NAMES: Final[Mapping[str, str]] = {
    f"mlp.shared_expert.{part}_proj": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
"""Names of modules in the files, by ours. There may be several shared experts, which form one wide MLP."""


def latent_attention(published: PublishedConfig, *, is_interleaved: bool) -> dict[str, Any]:
    """Returns the fields of a spec for attention over latents.

    Raises UnsupportedModel, naming the key, for what is not computed.
    """
    config = published.config
    published.require("attention_bias", False)
    published.require("num_key_value_heads", config.num_attention_heads)
    latents = LatentSpec(
        latent_dim=config.kv_lora_rank,
        plain_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        query_latent_dim=config.q_lora_rank,
        norm_epsilon=NORM_EPSILON,
        is_interleaved=is_interleaved,
    )
    rule = AttentionRule(scale=latents.query_dim**-0.5 * _stretched(published))
    return {
        "latents": latents,
        "kv_heads": 1,
        "head_dim": latents.key_dim,
        "layer_rules": (rule,) * config.num_hidden_layers,
    }


def deepseek_experts(published: PublishedConfig, **choice: Any) -> dict[str, Any]:
    """Returns the fields of a spec for layers with experts.

    `choice` has fields about how a token's experts are chosen. Raises UnsupportedModel, naming the key, for what is not
    computed.
    """
    config = published.config
    published.require("moe_layer_freq", 1)
    published.require("mlp_bias", False)
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace or 0
    if dense >= layers:
        return {"dense_layers": tuple(range(layers))}
    experts = ExpertSpec(
        count=config.n_routed_experts,
        per_token=experts_per_token(published, config.n_routed_experts),
        width=config.moe_intermediate_size,
        shared_width=config.moe_intermediate_size * (config.n_shared_experts or 0),
        has_shared_gate=False,
        scaling=float(config.routed_scaling_factor),
        **choice,
    )
    return {"experts": experts, "dense_layers": tuple(range(dense))}


def expert_groups(published: PublishedConfig, *, best: int) -> dict[str, int]:
    """Returns how many groups of experts there are, and how many of them a token chooses.

    A group's score is the sum of its `best` best experts' scores. Raises UnsupportedModel for groups that hold too few
    experts.
    """
    config = published.config
    groups, chosen, count = config.n_group, config.topk_group, config.n_routed_experts
    if not groups or count % groups or count // groups < best:
        raise published.refusal(f"n_group {groups!r} of {count} experts")
    if not chosen or not 1 <= chosen <= groups or chosen * (count // groups) < (config.num_experts_per_tok or 0):
        raise published.refusal(f"topk_group {chosen!r} of {groups} groups")
    return {"groups": groups, "groups_per_token": chosen}


def _stretched(published: PublishedConfig) -> float:
    """Returns yarn's factor of attention scores, which makes up for longer contexts (mscale_all_dim)."""
    parameters = published.config.rope_parameters
    by = parameters.get("mscale_all_dim", 0)
    if parameters.get("rope_type", "default") == "default" or not by or parameters["factor"] <= 1:
        return 1.0
    return float((0.1 * by * math.log(parameters["factor"]) + 1.0) ** 2)


def _deepseek_v2(published: PublishedConfig) -> ModelSpec:
    """Returns a decoder with latents, and experts weighted by a softmax. In some models a token's experts are from its
    best groups only."""
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


DEEPSEEK_V2: Final = Family(
    architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", read=_deepseek_v2, names=NAMES
)


def _deepseek_v3(published: PublishedConfig) -> ModelSpec:
    """Returns a decoder with latents, and experts weighted by sigmoids, chosen with a correction from a token's best
    groups.

    Layers that predict further tokens (num_nextn_predict_layers) follow the model's own, and are not read.
    """
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


DEEPSEEK_V3: Final = Family(
    architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", read=_deepseek_v3, names=NAMES
)
