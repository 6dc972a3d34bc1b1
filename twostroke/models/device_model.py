"""A dense decoder on a device as a straight line of few launches: each residual sum comes with the norm after it.

x --norm--> qkv --[head norm]--> rope, pages <- k v, attend --> output --(+)norm--> gate * up --> down --(+)norm--> ..
"""

from __future__ import annotations

import torch
from torch.nn import functional

from twostroke.kernels.attention import AttentionStep
from twostroke.kernels.elementwise import Elementwise
from twostroke.kernels.stored import plain
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensors import DenseWeights, DeviceLayer, DeviceWeights

EVERY_ROW = slice(None)


class DeviceModel:
    def __init__(self, spec: ModelSpec, weights: DeviceWeights, elementwise: Elementwise) -> None:
        self._spec = spec
        self._weights = weights
        self._elementwise = elementwise
        self._qkv_heads = [spec.heads, spec.kv_heads, spec.kv_heads]

    def forward(
        self, tokens: torch.Tensor, step: AttentionStep, sample_rows: torch.Tensor | slice | None
    ) -> torch.Tensor | None:
        """Write the KV of all tokens; logits [sampled, vocab] of the rows that are sampled.

        None for `sample_rows` stops as soon as the last layer's KV is written.
        """
        weights, elementwise, epsilon = self._weights, self._elementwise, self._spec.norm_epsilon
        x = functional.embedding(tokens, weights.embedding)
        normed = elementwise.norm(x, weights.layers[0].attention_norm.weight, epsilon)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            q = self._store(index, layer, normed, step)
            if index == last and sample_rows is None:
                return None
            attended = step.attend(index, q)
            if index == last and sample_rows is not None:
                x, attended = x[sample_rows], attended[sample_rows]
            attention = _dense(attended, layer.attention_output)
            normed, x = elementwise.add_norm(attention, x, layer.mlp_norm.weight, epsilon)
            assert layer.mlp is not None, "devices compute no experts"
            inner = elementwise.silu_mul(_dense(normed, layer.mlp.inner))
            next_norm = (weights.norm if index == last else weights.layers[index + 1].attention_norm).weight
            normed, x = elementwise.add_norm(_dense(inner, layer.mlp.down), x, next_norm, epsilon)
        assert weights.head is not None, "sampling on a worker without a head"
        return functional.linear(normed, weights.head)

    def _store(self, index: int, layer: DeviceLayer, normed: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Queries of this layer, rotated; keys and values are in their pages."""
        qkv = _dense(normed, layer.qkv).view(len(normed), -1, self._spec.head_dim)
        q, k, v = torch.split(qkv, self._qkv_heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._head_norm(q, layer.q_norm), self._head_norm(k, layer.k_norm)
        return step.store(index, q, k, v)

    def _head_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._spec.norm_epsilon)


def _dense(x: torch.Tensor, weights: DenseWeights) -> torch.Tensor:
    return functional.linear(x, plain(weights.weight), weights.bias)
