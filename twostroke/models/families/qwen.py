"""Qwen 2, 2.5 and 3, and their models with experts in some layers or in all."""

from __future__ import annotations

from typing import Any, Final

from twostroke.models.families.common import attention_bias, attention_rules, experts_per_token, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ExpertSpec, ModelSpec


def qwen_experts(published: PublishedConfig, *, shared_width: int = 0) -> dict[str, Any]:
    """Returns the fields of a spec for the layers of a Qwen model that have experts.

    Raises UnsupportedModel, naming the key, for what is not computed.
    """
    config = published.config
    if not config.num_experts:
        return {}
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    if step < 1:
        raise published.refusal(f"decoder_sparse_step {step!r}")
    layers = range(config.num_hidden_layers)
    return {
        "experts": ExpertSpec(
            count=config.num_experts,
            per_token=experts_per_token(published, config.num_experts),
            width=config.moe_intermediate_size,
            is_normalised=bool(config.norm_topk_prob),
            shared_width=shared_width,
        ),
        "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    }


def _qwen2(published: PublishedConfig) -> ModelSpec:
    """Returns Llama with biases on q, k and v, and sliding upper layers where the config asks for them."""
    return read_like_llama(
        published, architecture=QWEN2.architecture, qkv_bias=True, layer_rules=attention_rules(published)
    )


QWEN2: Final = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", read=_qwen2)


def _qwen3(published: PublishedConfig) -> ModelSpec:
    """Returns Llama with a norm on each head of q and k, and sliding layers where the config turns them on."""
    rules = attention_rules(published)
    return read_like_llama(
        published, architecture=QWEN3.architecture, qk_norm=True, layer_rules=rules, **attention_bias(published)
    )


QWEN3: Final = Family(architecture="Qwen3ForCausalLM", model_type="qwen3", read=_qwen3)


def _qwen2_moe(published: PublishedConfig) -> ModelSpec:
    """Returns Qwen2 with experts in some layers, and a shared expert that has a gate. Qwen1.5-MoE is one, too."""
    config = published.config
    return read_like_llama(
        published,
        architecture=QWEN2_MOE.architecture,
        qkv_bias=bool(config.qkv_bias),
        layer_rules=attention_rules(published),
        **qwen_experts(published, shared_width=config.shared_expert_intermediate_size),
    )


QWEN2_MOE: Final = Family(architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", read=_qwen2_moe)


def _qwen3_moe(published: PublishedConfig) -> ModelSpec:
    """Returns Qwen3 with experts in some layers, or in all."""
    return read_like_llama(
        published,
        architecture=QWEN3_MOE.architecture,
        qk_norm=True,
        layer_rules=attention_rules(published),
        **attention_bias(published),
        **qwen_experts(published),
    )


QWEN3_MOE: Final = Family(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", read=_qwen3_moe)
