"""A dense decoder (Llama, Mistral, Qwen2, Qwen3) as a straight line over one ragged batch.

x --norm--> qkv --[head norm]--> rope, pages <- k v, attend --> output --(+)--> norm --> gated --> down --(+)--> x
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from twostroke.kernels.attention import AttentionBackend, AttentionStep, RaggedBatch
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.products import LayerWeights, ModelWeights


class Model(Protocol):
    """What a runner steps."""

    def forward(
        self, tokens: torch.Tensor, batch: RaggedBatch, sample_rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Write the KV of all tokens; logits [len(sample_rows), vocab] of the rows that are sampled.

        None for `sample_rows` stops as soon as the last layer's KV is written.
        """


class Transformer:
    """In torch's operations, on any device: weights, and the attention backend that knows the pages."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, backend: AttentionBackend) -> None:
        self._spec = spec
        self._weights = weights
        self._backend = backend
        self._qkv_heads = [spec.heads, spec.kv_heads, spec.kv_heads]

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, batch: RaggedBatch, sample_rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        step = self._backend.begin(batch)
        x = self._weights.embedding[tokens]
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            q = self._store(index, layer, x, step)
            if index == last and sample_rows is None:
                return None
            attended = step.attend(index, q)
            if index == last:
                x, attended = x[sample_rows], attended[sample_rows]
            x = self._finish(layer, x, attended)
        assert self._weights.head is not None, "sampling on a worker without a head"
        return self._weights.head(self._norm(x, self._weights.norm))

    def _store(self, index: int, layer: LayerWeights, x: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Queries of this layer, rotated; keys and values are in their pages."""
        spec = self._spec
        qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(qkv, self._qkv_heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return step.store(index, q, k, v)

    def _finish(self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + layer.attention_output(attended)
        return x + layer.down(layer.gated(self._norm(x, layer.mlp_norm)))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._spec.rms_norm_eps)
