"""Small random models of every family, with every option that a published config of the family uses."""

from __future__ import annotations

from typing import Any, Final

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.unit.models.test_registry import SIZES

WINDOW: Final = 21
"""Tokens that window layers see: some blocks and a part of one."""
WIDE: Final[dict[str, Any]] = SIZES | {"hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA: Final[dict[str, Any]] = WIDE | {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}
MIXED: Final = ["sliding_attention", "full_attention"]
NEOX: Final[dict[str, Any]] = {key: value for key, value in WIDE.items() if key != "num_key_value_heads"}
EXPERTS: Final[dict[str, Any]] = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 36}
SHARED: Final[dict[str, Any]] = EXPERTS | {"shared_expert_intermediate_size": 44}
OSS: Final[dict[str, Any]] = SIZES | {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LATENTS: Final[dict[str, Any]] = SIZES | {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "initializer_range": 0.2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 36,
    "first_k_dense_replace": 1,
}
"""DeepSeek V2-Lite, small: the first layer is dense."""
V3: Final[dict[str, Any]] = LATENTS | {
    "q_lora_rank": 40,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_mtp_layers": 0,
}
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
DEEP: Final[dict[str, Any]] = SIZES | {"num_hidden_layers": 4}
GPT: Final[dict[str, Any]] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 131,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def longrope(pairs: int) -> dict[str, Any]:
    """Returns Phi's rope for contexts beyond 64 tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.03 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.5 * pair for pair in range(pairs)],
        "original_max_position_embeddings": 64,
    }


CONFIGS: Final[dict[str, PreTrainedConfig]] = {
    "mistral, window": MistralConfig(**WIDE, sliding_window=WINDOW),
    "qwen2, windows above": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3, windows above": Qwen3Config(
        **SIZES, head_dim=16, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma2": Gemma2Config(**GEMMA),
    "gemma2, tight caps": Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma2, biased": Gemma2Config(**GEMMA, attention_bias=True, layer_types=MIXED[::-1]),
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=MIXED),
    "gemma3, linear rope": Gemma3TextConfig(
        **GEMMA,
        layer_types=MIXED,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": Phi3Config(**WIDE),
    "phi3, window": Phi3Config(**WIDE, sliding_window=WINDOW),
    "phi3, long and partly rotated": Phi3Config(
        **WIDE, rope_parameters=longrope(6) | {"partial_rotary_factor": 0.75}, original_max_position_embeddings=64
    ),
    "gpt_neox": GPTNeoXConfig(**NEOX),
    "gpt_neox, one after the other": GPTNeoXConfig(
        **NEOX, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast"
    ),
    "gpt_neox, rotated whole": GPTNeoXConfig(**NEOX, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0}),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "mixtral, window": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1, sliding_window=WINDOW),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **SHARED),
    "qwen2_moe, some layers dense": Qwen2MoeConfig(
        **DEEP, **SHARED, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[3], qkv_bias=False
    ),
    "qwen2_moe, windows": Qwen2MoeConfig(
        **SIZES, **SHARED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3_moe, some layers dense": Qwen3MoeConfig(
        **DEEP, **EXPERTS, head_dim=16, decoder_sparse_step=2, mlp_only_layers=[1], attention_bias=True
    ),
    "qwen3_moe, window": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, use_sliding_window=True, sliding_window=WINDOW, tie_word_embeddings=True
    ),
    "gpt_oss": GptOssConfig(
        **OSS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
    "gpt_oss, tight limit, no biases of attention": GptOssConfig(
        **OSS,
        layer_types=MIXED[::-1],
        swiglu_limit=0.5,
        swiglu_alpha=1.3,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    ),
    "deepseek_v2, lite": DeepseekV2Config(**LATENTS),
    "deepseek_v2, whole dense, yarn": DeepseekV2Config(
        **LATENTS | {"first_k_dense_replace": 9}, rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    ),
    "deepseek_v2": DeepseekV2Config(
        **LATENTS | {"q_lora_rank": 24, "n_routed_experts": 8},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3, whole dense, yarn": DeepseekV3Config(
        **V3 | {"first_k_dense_replace": 3}, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}
    ),
    "deepseek_v3": DeepseekV3Config(**V3, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek_v3, weights as they are": DeepseekV3Config(
        **V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-5,
        rope_interleave=False,
    ),
    "gpt2": GPT2Config(**GPT),
    "gpt2, scores by layer": GPT2Config(
        **GPT, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, n_inner=80
    ),
    "gpt2, own head": GPT2Config(**GPT, tie_word_embeddings=False, activation_function="gelu"),
}
SHORT_LONGROPE: Final = Phi3Config(**WIDE, rope_parameters=longrope(8), original_max_position_embeddings=64)
"""A model whose longrope has other numbers where no more than 64 tokens are served."""
