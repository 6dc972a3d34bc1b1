"""From a directory of safetensors, sharded or not, to the fused tensors that the native model computes with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.kernels.linear import Linear, Linears, TorchLinears
from twostroke.models.files import TensorFiles
from twostroke.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    attention_norm: torch.Tensor
    qkv: Linear
    """hidden -> q heads, then k heads, then v heads"""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Linear
    mlp_norm: torch.Tensor
    gated: Linear
    """hidden -> silu(gate) * up"""
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear | None
    """None on a worker that never samples."""


def load_weights(
    directory: Path, spec: ModelSpec, dtype: torch.dtype, *, with_head: bool, linears: Linears | None = None
) -> ModelWeights:
    """With products as `linears` makes them, torch's where it is None.

    Raises ConfigError naming a tensor that is missing or has another shape than the config says.
    """
    linears = linears or TorchLinears()
    with TensorFiles(directory, dtype) as files:
        embedding = files.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = tuple(_load_layer(files, f"model.layers.{layer}", spec, linears) for layer in range(spec.layers))
        norm = files.take("model.norm.weight", spec.hidden_size)
        head = None
        if with_head:
            name = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
            head = linears.linear(files.take(name, spec.vocab_size, spec.hidden_size))
        return ModelWeights(embedding, layers, norm, head)


def _load_layer(files: TensorFiles, prefix: str, spec: ModelSpec, linears: Linears) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [(f"{attention}.{part}_proj", rows) for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))]
    output = [(f"{attention}.o_proj", hidden)]
    gate_up = [(f"{mlp}.{part}_proj", inner) for part in ("gate", "up")]
    down = [(f"{mlp}.down_proj", hidden)]
    return LayerWeights(
        attention_norm=files.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=linears.linear(*_stacked(files, qkv, hidden, has_bias=spec.qkv_bias)),
        q_norm=files.take(f"{attention}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=files.take(f"{attention}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        attention_output=linears.linear(*_stacked(files, output, q_rows, has_bias=spec.attention_output_bias)),
        mlp_norm=files.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gated=linears.gated(*_stacked(files, gate_up, hidden, has_bias=spec.mlp_bias)),
        down=linears.linear(*_stacked(files, down, inner, has_bias=spec.mlp_bias)),
    )


def _stacked(
    files: TensorFiles, parts: list[tuple[str, int]], columns: int, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of one product for several projections of the same input, in the order given."""
    weight = torch.cat([files.take(f"{name}.weight", rows, columns) for name, rows in parts])
    bias = torch.cat([files.take(f"{name}.bias", rows) for name, rows in parts]) if has_bias else None
    return weight, bias
