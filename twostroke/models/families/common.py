"""What families of Llama's kind have in common: RMS norms, a gated MLP, rotary positions, one rule for most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.kernels.activation import Activation
from twostroke.kernels.attention.rules import AttentionRule
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import reach, read_rope
from twostroke.models.spec import ModelSpec


def read_like_llama(published: PublishedConfig, **differing: Any) -> ModelSpec:
    """Returns the spec of a decoder of Llama's kind. `differing` are fields with other values.

    Raises UnsupportedModel for what we would compute wrongly.
    """
    config = published.config
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": published.head_dim(),
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "eos_token_ids": published.eos_token_ids(),
        "norm_epsilon": config.rms_norm_eps,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
    }
    if "ropes" not in differing:
        fields |= {"ropes": (read_rope(published),), "max_position_embeddings": reach(published)}
    if "activation" not in differing:
        fields["activation"] = Activation(published.activation())
    return ModelSpec(**(fields | differing))


def attention_bias(published: PublishedConfig) -> Mapping[str, bool]:
    """Returns the bias fields of a family in which all projections have biases or none has, as its config says."""
    has_bias = bool(getattr(published.config, "attention_bias", False))
    return {"qkv_bias": has_bias, "attention_output_bias": has_bias}


def attention_rules(
    published: PublishedConfig, *, scale: float | None = None, softcap: float | None = None, sliding_rope: int = 0
) -> tuple[AttentionRule, ...]:
    """Returns the attention rule of each layer; an empty tuple where all rules are usual.

    A config names the kind of each layer, or has one window for all. Raises UnsupportedModel for other kinds than full
    and sliding, and for a window below one token.
    """
    config, window = published.config, published.config.sliding_window
    names_kinds = hasattr(type(config), "layer_types")
    if not names_kinds and window is None:
        return ()
    kinds = published.layer_types() if names_kinds else ["sliding_attention"] * config.num_hidden_layers
    has_sliding = "sliding_attention" in kinds
    if scale is None and softcap is None and not has_sliding:
        return ()
    if has_sliding and window is not None and window < 1:
        raise published.refusal(f"sliding_window {window!r}")
    usual = published.head_dim() ** -0.5 if scale is None else scale
    full = AttentionRule(scale=usual, softcap=softcap)
    sliding = AttentionRule(scale=usual, softcap=softcap, window=window, rope=sliding_rope)
    return tuple(full if kind == "full_attention" else sliding for kind in kinds)


def experts_per_token(published: PublishedConfig, count: int) -> int:
    """Returns how many experts a token is routed to. Raises UnsupportedModel for none, and for more than there are."""
    chosen = int(published.config.num_experts_per_tok)
    if not 1 <= chosen <= count:
        raise published.refusal(f"num_experts_per_tok {chosen!r} of {count} experts")
    return chosen
