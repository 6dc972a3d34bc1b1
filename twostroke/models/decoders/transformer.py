"""A decoder as a straight line over one ragged batch.

x --norm--> qkv --[head norm]--> rope, pages <- k v, attend --> output --[norm]--(+)-->
    norm --> inner --> down --[norm]--(+)--> x

A layer with experts has a mixture of such MLPs.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch.nn import functional

from twostroke.kernels import reference
from twostroke.kernels.attention.interface import AttentionBackend, AttentionStep, RaggedBatch
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.decoders.mixture import counters, mixture
from twostroke.models.expert_load import ExpertLoad
from twostroke.models.spec import LatentSpec, ModelSpec
from twostroke.models.weights.products import Latents, LayerWeights, ModelWeights
from twostroke.models.weights.tensors import NormWeights


class Model(Protocol):
    """A model that a runner computes steps with."""

    expert_load: ExpertLoad | None
    """Tokens of each expert so far; None for a dense model."""

    def forward(
        self, tokens: torch.Tensor, batch: RaggedBatch, sample_rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Writes the KV of all tokens, and returns logits [len(sample_rows), vocab] of the rows that are sampled.

        With None for `sample_rows`, it stops as soon as the last layer's KV is written.
        """


class AddedProducts(Protocol):
    """What a step adds to matrix products of the model, row by row."""

    def add(self, layer: int, stack: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds to a product y of x, in place, and returns y. `stack`: qkv, output, gate_up or down."""

    def pruned(self, rows: torch.Tensor) -> AddedProducts:
        """Returns the object that adds to only these rows."""


class Transformer:
    """A decoder in torch's operations, on any device: its weights, and the attention backend with the pages."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, backend: AttentionBackend, collective: Collective | None = None
    ) -> None:
        self._spec = spec
        self._collective = collective or Alone()
        self._weights = weights
        self._backend = backend
        self._qkv_heads = [spec.heads, spec.kv_heads, spec.kv_heads]
        self.expert_load, self._expert_tokens = counters(spec)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, batch: RaggedBatch, sample_rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        step = self._backend.begin(batch)
        added: AddedProducts | None = batch.added
        x = self._embedded(tokens, batch.positions)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            q = self._store(index, layer, x, step, added)
            if index == last and sample_rows is None:
                return None
            attended = step.attend(index, q, layer.sinks)
            if layer.latents is not None:
                attended = values_of(attended, layer.latents)
            if index == last:
                x, attended = x[sample_rows], attended[sample_rows]
                added = None if added is None or sample_rows is None else added.pruned(sample_rows)
            x = self._finish(index, layer, x, attended, added)
        assert self._weights.head is not None, "sampling on a worker without a head"
        logits = self._collective.gather(self._weights.head(self._norm(x, self._weights.norm)))
        return None if logits is None else reference.capped(logits, self._spec.final_softcap)

    def _embedded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedding = self._weights.embedding
        assert isinstance(embedding, torch.Tensor), "torch takes plain numbers"
        x = embedding[tokens]
        if self._spec.embedding_scale != 1:
            x = x * torch.tensor(self._spec.embedding_scale, dtype=x.dtype, device=x.device)
        return x if self._weights.positions is None else x + self._weights.positions[positions]

    def _store(
        self, index: int, layer: LayerWeights, x: torch.Tensor, step: AttentionStep, added: AddedProducts | None
    ) -> torch.Tensor:
        """Writes the layer's keys and values into the pages, and returns its rotated queries."""
        spec = self._spec
        normed = self._norm(x, layer.attention_norm)
        if layer.latents is not None and spec.latents is not None:
            q, k = queries_and_keys(layer.qkv(normed), layer.latents, spec.latents)
            return step.store(index, q, k, k[..., : spec.latents.latent_dim])
        qkv = _with(added, index, "qkv", normed, layer.qkv(normed)).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(qkv, self._qkv_heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)
        return step.store(index, q, k, v)

    def _finish(
        self, index: int, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor, added: AddedProducts | None
    ) -> torch.Tensor:
        part = _with(added, index, "output", attended, layer.attention_output(attended))
        attention = self._collective.all_reduce(part)
        if layer.attention_output_norm is not None:
            attention = self._norm(attention, layer.attention_output_norm)
        if self._spec.is_parallel:
            return self._mlp(index, layer, x, added) + attention + x
        x = x + attention
        return x + self._mlp(index, layer, x, added)

    def _mlp(self, index: int, layer: LayerWeights, x: torch.Tensor, added: AddedProducts | None) -> torch.Tensor:
        normed, experts = self._norm(x, layer.mlp_norm), self._spec.experts_of(index)
        if experts is not None and layer.experts is not None:
            part = mixture(normed, layer.experts, layer.mlp, experts, self._expert_tokens[index])
            return self._collective.all_reduce(part)
        assert layer.mlp is not None, "a dense layer has an MLP"
        inner = layer.mlp.inner(normed, functools.partial(_with, added, index, "gate_up"))
        y = self._collective.all_reduce(_with(added, index, "down", inner, layer.mlp.down(inner)))
        return y if layer.mlp_output_norm is None else self._norm(y, layer.mlp_output_norm)

    def _norm(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        if norm.bias is None:
            return self._rms_norm(x, norm.weight)
        return functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._spec.norm_epsilon)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns x normalised in the dtype of the weight. The result has the dtype of x."""
        wide = x.to(weight.dtype)
        return functional.rms_norm(wide, weight.shape, weight, self._spec.norm_epsilon).to(x.dtype)


def _with(added: AddedProducts | None, layer: int, stack: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns a product y of x with what the step adds to it."""
    return y if added is None else added.add(layer, stack, x, y)


def queries_and_keys(projected: torch.Tensor, weights: Latents, spec: LatentSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q [T, heads, key_dim] and k [T, 1, key_dim], both before rope, of a layer's projected input.

    The model has a product that makes keys and values from latents. Its keys' half is applied to each head's query
    instead of to all latents, so that queries attend to latents directly. Attention returns a sum of latents, which the
    values' half turns into one of values.

    `projected` [T, ..] has queries or their latent, then the latent of keys and values and the rotated key.
    """
    rows = len(projected)
    queries = projected.shape[1] - spec.key_dim
    q, latent, rotated = torch.split(projected, [queries, spec.latent_dim, spec.rope_dim], dim=1)
    if weights.queries is not None and weights.query_norm is not None:
        q = weights.queries(_latent_norm(q, weights.query_norm, spec))
    plain, turned = torch.split(q.reshape(rows, -1, spec.query_dim), [spec.plain_dim, spec.rope_dim], dim=2)
    absorbed = torch.stack([product(plain[:, head]) for head, product in enumerate(weights.absorb)], dim=1)
    k = torch.cat((_latent_norm(latent, weights.norm, spec), rotated), dim=1)
    return torch.cat((absorbed, turned), dim=2), k[:, None]


def values_of(attended: torch.Tensor, weights: Latents) -> torch.Tensor:
    """Returns values [T, heads * value_dim] of each head's sum of latents [T, heads * latent_dim]."""
    by_head = attended.chunk(len(weights.expand), dim=1)
    return torch.cat([product(latents) for latents, product in zip(by_head, weights.expand, strict=True)], dim=1)


def _latent_norm(x: torch.Tensor, weight: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, spec.norm_epsilon)
