"""The matrix products of a model, made from the weights of a source."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from twostroke.kernels.activation import Activation
from twostroke.kernels.products.linear import ActivatedProduct, Linear, Linears
from twostroke.kernels.products.stored import StoredMatrix
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensors import (
    DeviceLayer,
    ExpertWeights,
    LatentWeights,
    MlpWeights,
    NormWeights,
    WeightSource,
    take_layer,
    take_norm,
    take_positions,
)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    inner: ActivatedProduct
    """hidden -> activated channels"""
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The experts of a layer."""

    router: Linear
    """hidden -> a logit of each expert in float32, and then that of a shared expert's gate"""
    table: tuple[Mlp, ...]
    """The products of each expert that is held here."""
    correction: torch.Tensor | None = None
    """float32 [experts], added to scores when experts are chosen."""
    first: int = 0
    """The index of the table's first expert among all experts of the layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """What makes queries, keys and values from latents: `LatentWeights` as matrix products."""

    norm: torch.Tensor
    query_norm: torch.Tensor | None
    queries: Linear | None
    absorb: tuple[Linear, ...]
    expand: tuple[Linear, ...]
    up: Linear | None = None
    """None where prompts are not expanded."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    attention_norm: NormWeights
    qkv: Linear
    """hidden -> q heads, then k heads, then v heads. With latents: q heads or their latent, then what pages hold"""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Linear
    mlp_norm: NormWeights
    mlp: Mlp | None
    """The MLP that all rows go through; None where the layer has experts and no shared one."""
    experts: Experts | None
    attention_output_norm: NormWeights | None
    mlp_output_norm: NormWeights | None
    sinks: torch.Tensor | None
    """float32 [heads]"""
    latents: Latents | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    embedding: torch.Tensor | Linear
    """[vocab, hidden]; a product with it, where it stays quantised."""
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    head: Linear | None
    """None on a worker that never samples."""
    positions: torch.Tensor | None = None
    """Learned vectors [positions, hidden]."""


def take_products(
    source: WeightSource, spec: ModelSpec, *, with_head: bool, linears: Linears, may_expand: bool = False
) -> ModelWeights:
    """Returns the products of a model.

    `may_expand`: whether they include those that expand prompts of latents. Raises what the source raises.
    """
    table = source.take_matrix("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    embedding = linears.linear((table,)) if isinstance(table, StoredMatrix) else table
    positions = take_positions(source, spec)
    packed = functools.partial(
        layer_products,
        linears=linears,
        activation=spec.activation,
        first_expert=spec.held_experts.start,
        may_expand=may_expand,
    )
    layers = tuple(packed(take_layer(source, layer, spec)) for layer in range(spec.layers))
    norm = take_norm(source, "model.norm", spec)
    head = None
    if with_head:
        head = _head(source, spec, embedding, linears)
    return ModelWeights(embedding, layers, norm, head, positions)


def _head(source: WeightSource, spec: ModelSpec, embedding: torch.Tensor | Linear, linears: Linears) -> Linear:
    """Returns the head. It is the tied embedding where that is a product already and this process computes all
    logits."""
    if spec.tie_word_embeddings and spec.share is None and not isinstance(embedding, torch.Tensor):
        return embedding
    name = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    matrix, words = source.take_matrix(name, spec.vocab_size, spec.hidden_size), spec.vocabulary
    if isinstance(matrix, torch.Tensor):
        return linears.linear(matrix[words.start : words.stop])
    return linears.linear((matrix.picked(torch.arange(words.start, words.stop)),))


def layer_products(
    layer: DeviceLayer, linears: Linears, activation: Activation, *, first_expert: int = 0, may_expand: bool = False
) -> LayerWeights:
    """Returns the products of a layer. Raises ConfigError for codes that cannot be read."""
    return LayerWeights(
        attention_norm=layer.attention_norm,
        qkv=linears.linear(layer.qkv.weight, layer.qkv.bias),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        attention_output=linears.linear(layer.attention_output.weight, layer.attention_output.bias),
        mlp_norm=layer.mlp_norm,
        mlp=None if layer.mlp is None else _packed_mlp(layer.mlp, linears, activation),
        experts=None if layer.experts is None else _packed_experts(layer.experts, linears, activation, first_expert),
        attention_output_norm=layer.attention_output_norm,
        mlp_output_norm=layer.mlp_output_norm,
        sinks=layer.sinks,
        latents=None if layer.latents is None else _packed_latents(layer.latents, linears, may_expand=may_expand),
    )


def _packed_latents(latents: LatentWeights, linears: Linears, *, may_expand: bool) -> Latents:
    queries = latents.queries
    return Latents(
        norm=latents.norm,
        query_norm=latents.query_norm,
        queries=None if queries is None else linears.linear(queries.weight, queries.bias),
        absorb=tuple(linears.linear(weight) for weight in latents.absorb),
        expand=tuple(linears.linear(weight) for weight in latents.expand),
        up=linears.linear(latents.up) if may_expand else None,
    )


def _packed_mlp(mlp: MlpWeights, linears: Linears, activation: Activation) -> Mlp:
    inner = linears.activated(mlp.inner.weight, mlp.inner.bias, activation)
    return Mlp(inner, linears.linear(mlp.down.weight, mlp.down.bias))


def _packed_experts(experts: ExpertWeights, linears: Linears, activation: Activation, first: int) -> Experts:
    router = linears.exact(experts.router, experts.router_bias)
    table = tuple(_packed_mlp(mlp, linears, activation) for mlp in experts.table)
    return Experts(router, table, experts.correction, first)
