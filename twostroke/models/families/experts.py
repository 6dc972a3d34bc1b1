"""What families with experts have in common, and how their options are refused."""

from __future__ import annotations

from typing import Any

from twostroke.models.families.published import PublishedConfig
from twostroke.models.spec import ExpertSpec


def qwen_experts(published: PublishedConfig, *, shared_width: int = 0) -> dict[str, Any]:
    """Returns the fields of a spec that say which layers of a Qwen model have experts, and how.

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


def experts_per_token(published: PublishedConfig, count: int) -> int:
    """Returns how many experts a token has. Raises UnsupportedModel for none, and for more than there are."""
    chosen = int(published.config.num_experts_per_tok)
    if not 1 <= chosen <= count:
        raise published.refusal(f"num_experts_per_tok {chosen!r} of {count} experts")
    return chosen
