"""Small random models of architectures that have no file of ours, each with what sets it apart."""

from __future__ import annotations

from typing import Any, Final

from transformers import (
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    Glm4Config,
    GraniteConfig,
    MiniCPM3Config,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

WINDOW: Final = 21
"""Tokens that window layers see: some blocks and a part of one."""
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEP: Final[dict[str, Any]] = SIZES | {"num_hidden_layers": 4}
OPT: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GENERIC: Final[dict[str, PreTrainedConfig]] = {
    "opt": OPTConfig(**OPT),
    "opt, norms behind, projected embedding": OPTConfig(
        **(OPT | {"word_embed_proj_dim": 32}), do_layer_norm_before=False
    ),
    "stablelm": StableLmConfig(**SIZES, use_qkv_bias=True, qk_layernorm=True),
    "olmo2": Olmo2Config(**SIZES),
    "cohere": CohereConfig(**SIZES, logit_scale=0.5, use_qk_norm=True),
    "cohere2": Cohere2Config(**DEEP, logit_scale=0.5, sliding_window=WINDOW),
    "glm4": Glm4Config(**SIZES, head_dim=16),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "granite": GraniteConfig(
        **SIZES,
        attention_multiplier=0.2,
        embedding_multiplier=2.0,
        logits_scaling=3.0,
        residual_multiplier=0.7,
    ),
    "smollm3": SmolLM3Config(**DEEP),
    "exaone4": Exaone4Config(**DEEP, sliding_window=WINDOW, sliding_window_pattern=2),
    "phi": PhiConfig(**SIZES),
    "olmoe": OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2),
    "minicpm3, latent": MiniCPM3Config(
        **(SIZES | {"num_key_value_heads": 4}),
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
}
