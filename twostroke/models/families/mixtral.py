"""Mixtral: Mistral with experts in every layer. The weights of the chosen experts are normalised."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_rules, read_like_llama
from twostroke.models.families.experts import experts_per_token
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ExpertSpec, ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
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
    read=_read,
    names={
        "mlp.gate": "block_sparse_moe.gate",
        **{
            f"mlp.experts.*.{ours}_proj": f"block_sparse_moe.experts.*.{theirs}"
            for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
    },
)
