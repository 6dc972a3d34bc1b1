"""GPT-2, GPT-NeoX and Pythia: norms with a mean and a bias."""

from __future__ import annotations

from typing import Final

from twostroke.kernels.activation import Activation
from twostroke.kernels.attention.rules import AttentionRule
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import no_rope, reach, read_rope
from twostroke.models.families.tensors import Family, FusedRows
from twostroke.models.spec import ModelSpec


def _gpt2(published: PublishedConfig) -> ModelSpec:
    """Returns a decoder with learned positions. Its files store matrices as [inputs, outputs]."""
    config = published.config
    published.require("add_cross_attention", False)
    return ModelSpec(
        architecture=GPT2.architecture,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=published.head_dim(),
        intermediate_size=config.n_inner or 4 * config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.n_positions,
        eos_token_ids=published.eos_token_ids(),
        ropes=(no_rope(published.head_dim()),),
        norm_epsilon=config.layer_norm_epsilon,
        layer_rules=tuple(AttentionRule(scale=_scale(published, index)) for index in range(config.num_hidden_layers)),
        activation=Activation(published.activation("activation_function"), is_gated=False),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        is_layer_norm=True,
        has_position_table=True,
    )


def _scale(published: PublishedConfig, layer: int) -> float:
    config = published.config
    scale: float = published.head_dim() ** -0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _fused_gpt2(spec: ModelSpec) -> dict[str, FusedRows]:
    parts = (spec.hidden_size,) * 3
    return {f"self_attn.{name}_proj": FusedRows(1, parts, index) for index, name in enumerate("qkv")}


GPT2: Final = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    read=_gpt2,
    names={
        "model.embed_tokens": "transformer.wte",
        "model.position_embeddings": "transformer.wpe",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        **{f"self_attn.{name}_proj": "attn.c_attn" for name in "qkv"},
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    layers="transformer.h",
    fused=_fused_gpt2,
    is_transposed=True,
)


def _gpt_neox(published: PublishedConfig) -> ModelSpec:
    """Returns a decoder with attention and MLP side by side, and partly rotated heads."""
    config = published.config
    has_bias = bool(config.attention_bias)
    return ModelSpec(
        architecture=GPT_NEOX.architecture,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=published.head_dim(),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=reach(published),
        eos_token_ids=published.eos_token_ids(),
        ropes=(read_rope(published, may_be_partial=True),),
        norm_epsilon=config.layer_norm_eps,
        activation=Activation(published.activation(), is_gated=False),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=True,
        is_layer_norm=True,
        is_parallel=bool(config.use_parallel_residual),
    )


def _fused_gpt_neox(spec: ModelSpec) -> dict[str, FusedRows]:
    parts = (spec.head_dim,) * 3
    return {f"self_attn.{name}_proj": FusedRows(spec.heads, parts, index) for index, name in enumerate("qkv")}


GPT_NEOX: Final = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    read=_gpt_neox,
    names={
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        **{f"self_attn.{name}_proj": "attention.query_key_value" for name in "qkv"},
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    layers="gpt_neox.layers",
    fused=_fused_gpt_neox,
)
