"""Tiny models with random weights, saved by transformers: our logits are theirs, or we refuse by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.torch_attention.gathered import TorchAttention
from twostroke.models.decoders.choice import load_weights
from twostroke.models.decoders.transformer import Transformer
from twostroke.models.registry import read_spec
from twostroke.models.rope import rope_tables

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

SERVED = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama wide heads": LlamaConfig(**SIZES, head_dim=32),
    "llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear rope": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "yarn rope": LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window that is never reached": MistralConfig(**SIZES, sliding_window=4096),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def saved(config: PreTrainedConfig, directory: Path, **save: Any) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # transformers starts them at 1 and 0, which hides mistakes
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("sinks"):
            torch.nn.init.uniform_(parameter, -1.0, 3.0)
    model.save_pretrained(directory, **save)
    return model


def our_logits(directory: Path, tokens: torch.Tensor, *, max_model_len: int | None = None) -> torch.Tensor:
    """Returns the logits of all positions of one prompt, through pages of 4 tokens."""
    spec = read_spec(directory, max_model_len)
    count = len(tokens)
    pool = PagePool.empty(-(-count // 4), "float32", spec.page_shape(4))
    backend = TorchAttention(pool, spec.heads, spec.rules)
    model = Transformer(spec, load_weights(directory, spec, torch.float32, with_head=True), backend)
    cosines, sines = rope_tables(spec.ropes, count)
    batch = RaggedBatch(
        positions=torch.arange(count, dtype=torch.int32),
        query_starts=(0, count),
        context_lens=(count,),
        block_tables=torch.arange(len(pool.numbers), dtype=torch.int32)[None],
        write_slots=torch.arange(count),
        cosines=cosines,
        sines=sines,
    )
    logits = model.forward(tokens, batch, torch.arange(count))
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = saved(SERVED[name], tmp_path)
    tokens = torch.randint(131, (150,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(our_logits(tmp_path, tokens), expected, rtol=1e-4, atol=1e-4)


def test_sharded_weights_load_like_whole_ones(tmp_path: Path) -> None:
    model = saved(SERVED["qwen3"], tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = torch.arange(20)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(our_logits(tmp_path, tokens), expected, rtol=1e-4, atol=1e-4)


def test_rope_scaling_stretches_the_served_length(tmp_path: Path) -> None:
    lengths = {}
    for name in ("llama", "llama3 rope", "linear rope", "yarn rope"):
        SERVED[name].save_pretrained(tmp_path / name)
        lengths[name] = read_spec(tmp_path / name).max_position_embeddings
    assert lengths == {"llama": 256, "llama3 rope": 256, "linear rope": 512, "yarn rope": 256}


def test_a_way_to_quantise_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    options = {"quant_method": "bitsandbytes"}
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], quantization_config=options).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"quantised weights \(bitsandbytes\) are not served; served: gptq, awq"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "never-heard-of"}, "never-heard-of"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UnsupportedModel) as refusal:
        read_spec(tmp_path)
    assert named in refusal.value.message
    assert "Qwen3ForCausalLM" in refusal.value.message


def test_experts_of_a_dense_family_are_refused_by_key(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, num_local_experts=4).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="num_local_experts"):
        read_spec(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    saved(SERVED["llama"], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.2\.input_layernorm\.weight"):
        load_weights(tmp_path, read_spec(tmp_path), torch.float32, with_head=True)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    saved(SERVED["llama"], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 130}))
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight has shape \(131, 48\).*\(130, 48\)"):
        load_weights(tmp_path, read_spec(tmp_path), torch.float32, with_head=True)


def test_a_config_that_is_no_json_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


def test_a_damaged_weight_file_is_a_config_error(tmp_path: Path) -> None:
    saved(SERVED["llama"], tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_weights(tmp_path, read_spec(tmp_path), torch.float32, with_head=True)
