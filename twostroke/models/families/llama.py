"""Llama, the plain decoder that most others differ from, Mistral, and Mixtral."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_bias, attention_rules, experts_per_token, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ExpertSpec, ModelSpec


def _llama(published: PublishedConfig) -> ModelSpec:
    return read_like_llama(published, architecture=LLAMA.architecture, **attention_bias(published))


LLAMA: Final = Family(architecture="LlamaForCausalLM", model_type="llama", read=_llama)


def _mistral(published: PublishedConfig) -> ModelSpec:
    """Returns Llama. Early models have a window in all layers."""
    return read_like_llama(published, architecture=MISTRAL.architecture, layer_rules=attention_rules(published))


MISTRAL: Final = Family(architecture="MistralForCausalLM", model_type="mistral", read=_mistral)


def _mixtral(published: PublishedConfig) -> ModelSpec:
    """Returns Mistral with experts in every layer. The weights of the chosen experts are normalised."""
    config = published.config
    experts = ExpertSpec(
        count=config.num_local_experts,
        per_token=experts_per_token(published, config.num_local_experts),
        width=config.intermediate_size,
        is_normalised=True,
    )
    return read_like_llama(
        published, architecture=MIXTRAL.architecture, layer_rules=attention_rules(published), experts=experts
    )


MIXTRAL: Final = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read=_mixtral,
    names={
        "mlp.gate": "block_sparse_moe.gate",
        **{
            f"mlp.experts.*.{ours}_proj": f"block_sparse_moe.experts.*.{theirs}"
            for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
    },
)
