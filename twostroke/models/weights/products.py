"""From a directory of safetensors, sharded or not, to the products that a model on the CPU computes with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.kernels.linear import Linear, Linears, TorchLinears
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.balanced_keys import balanced
from twostroke.models.weights.files import TensorFiles
from twostroke.models.weights.tensors import DeviceLayer, WeightSource, take_layer


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
    with TensorFiles(directory, dtype) as files:
        return take_products(balanced(files, spec), spec, with_head=with_head, linears=linears or TorchLinears())


def take_products(source: WeightSource, spec: ModelSpec, *, with_head: bool, linears: Linears) -> ModelWeights:
    """Raises what the source raises."""
    embedding = source.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(_packed(take_layer(source, layer, spec), linears) for layer in range(spec.layers))
    norm = source.take("model.norm.weight", spec.hidden_size)
    head = None
    if with_head:
        name = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
        head = linears.linear(source.take(name, spec.vocab_size, spec.hidden_size))
    return ModelWeights(embedding, layers, norm, head)


def _packed(layer: DeviceLayer, linears: Linears) -> LayerWeights:
    return LayerWeights(
        attention_norm=layer.attention_norm,
        qkv=linears.linear(layer.qkv.weight, layer.qkv.bias),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        attention_output=linears.linear(layer.attention_output.weight, layer.attention_output.bias),
        mlp_norm=layer.mlp_norm,
        gated=linears.gated(layer.gate_up.weight, layer.gate_up.bias),
        down=linears.linear(layer.down.weight, layer.down.bias),
    )
