"""A model of two layers with random weights, as a directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=64,
    max_position_embeddings=128,
    eos_token_id=2,
)
PAGE_BYTES = 2 * 2 * 1 * 16 * 16 * 4
"""Layers, K and V, heads, block, head dim, float32."""


def save_tiny(directory: Path, config: PreTrainedConfig = TINY) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory
