"""GPT-NeoX and Pythia: attention and MLP side by side, norms with a mean and a bias, partly rotated heads."""

from __future__ import annotations

from typing import Final

from twostroke.kernels.activation import Activation
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import reach, read_rope
from twostroke.models.families.tensors import Family, FusedRows
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
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


def _fused(spec: ModelSpec) -> dict[str, FusedRows]:
    parts = (spec.head_dim,) * 3
    return {f"self_attn.{name}_proj": FusedRows(spec.heads, parts, index) for index, name in enumerate("qkv")}


GPT_NEOX: Final = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    read=_read,
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
    fused=_fused,
)
