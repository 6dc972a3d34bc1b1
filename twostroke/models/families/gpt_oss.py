"""gpt-oss: every other layer has a window, each softmax has a sink, and experts have biases and a clamped
activation."""

from __future__ import annotations

from typing import Final

from twostroke.kernels.activation import Activation, Clamp
from twostroke.models.families.common import attention_bias, attention_rules, experts_per_token, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ExpertSpec, ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    config = published.config
    if published.activation() != "silu":
        raise published.refusal(f"hidden_act {config.hidden_act!r}")
    if not config.swiglu_limit > 0:
        raise published.refusal(f"swiglu_limit {config.swiglu_limit!r}")
    return read_like_llama(
        published,
        architecture=GPT_OSS.architecture,
        activation=Activation(clamp=Clamp(alpha=config.swiglu_alpha, limit=config.swiglu_limit)),
        layer_rules=attention_rules(published),
        has_sinks=True,
        mlp_bias=True,
        experts=ExpertSpec(
            count=config.num_local_experts,
            per_token=experts_per_token(published, config.num_local_experts),
            width=config.intermediate_size,
            is_normalised=True,
            has_router_bias=True,
        ),
        **attention_bias(published),
    )


GPT_OSS: Final = Family(
    architecture="GptOssForCausalLM", model_type="gpt_oss", read=_read, names={"mlp.gate": "mlp.router"}
)
