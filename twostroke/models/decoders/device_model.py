"""A decoder on a device, as a straight-line function of few launches. One launch computes a residual sum and the norm
after it.

x --norm--> qkv --[head norm]--> rope, pages <- k v, attend --> output --[norm]--(+)norm-->
    inner, activation --> down --[norm]--(+)norm--> ..

A layer with experts has a mixture of such MLPs. With several processes, output and down give parts of sums over all of
them, and the first one gathers the columns of the head.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from twostroke.kernels import reference
from twostroke.kernels.attention.interface import AttentionStep
from twostroke.kernels.products.elementwise import Elementwise
from twostroke.kernels.products.grouped import GroupedProducts
from twostroke.kernels.products.linear import Linears
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.decoders.device_mixture import DeviceMixture
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.products import LayerWeights, layer_products
from twostroke.models.weights.tensors import DeviceWeights, NormWeights

EVERY_ROW = slice(None)


class DeviceModel:
    """A decoder on one device. It reads quantised `weights` only while it is made. Raises ConfigError where it cannot
    read them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        elementwise: Elementwise,
        grouped: GroupedProducts,
        linears: Linears,
        collective: Collective | None = None,
    ) -> None:
        self._spec = spec
        self.collective = collective or Alone()
        """The other processes that compute the model."""
        self._elementwise = elementwise
        self._qkv_heads = [spec.heads, spec.kv_heads, spec.kv_heads]
        table = weights.embedding
        self._embedding, self._positions = table, weights.positions
        self._layers = tuple(layer_products(layer, linears, spec.activation) for layer in weights.layers)
        self._experts, self._last_norm = weights.experts, weights.norm
        self._head = None if weights.head is None else linears.linear(weights.head)
        self._mixture = DeviceMixture(spec, table.device, elementwise, grouped)
        self.expert_load = self._mixture.load
        # on the device before a step is recorded: a recorded step may copy nothing from the host
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=table.dtype, device=table.device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        sample_rows: torch.Tensor | slice | None,
        count: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Writes the KV of all tokens, and returns logits [sampled, vocab] of the rows that are sampled.

        With None for `sample_rows`, it stops as soon as the last layer's KV is written. Only the first process has
        logits. `count` int32 [1] says how many of the first rows are tokens, None that all are. Only those count in the
        load of experts.
        """
        layers = self._layers
        x = self._embedded(tokens, positions)
        normed = self._norm(x, layers[0].attention_norm)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            q = self._store(index, layer, normed, step)
            if index == last and sample_rows is None:
                return None
            attended = step.attend(index, q, layer.sinks)
            if index == last and sample_rows is not None:
                x, attended = x[sample_rows], attended[sample_rows]
            next_norm = self._last_norm if index == last else layers[index + 1].attention_norm
            normed, x = self._finish(index, x, attended, next_norm, count)
        assert self._head is not None, "sampling on a worker without a head"
        logits = self.collective.gather(self._head(normed))
        return None if logits is None else reference.capped(logits, self._spec.final_softcap)

    def _embedded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(tokens, self._embedding)
        if self._spec.embedding_scale != 1:
            x = x * self._embedding_scale
        table = self._positions
        return x if table is None else x + functional.embedding(positions, table)

    def _store(self, index: int, layer: LayerWeights, normed: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Writes the layer's keys and values into the pages, and returns its rotated queries."""
        qkv = layer.qkv(normed).view(len(normed), -1, self._spec.head_dim)
        q, k, v = torch.split(qkv, self._qkv_heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._head_norm(q, layer.q_norm), self._head_norm(k, layer.k_norm)
        return step.store(index, q, k, v)

    def publish_load(self) -> None:
        """Copies the counts of experts to the host, without waiting for the copy."""
        self._mixture.publish()

    def forget_load(self) -> None:
        """Sets the counts of experts to zero."""
        self._mixture.forget()

    def _finish(
        self,
        index: int,
        x: torch.Tensor,
        attended: torch.Tensor,
        next_norm: NormWeights,
        count: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the normalised input of the next layer, and the residual stream after this layer."""
        layer = self._layers[index]
        attention = self.collective.all_reduce(layer.attention_output(attended))
        if layer.attention_output_norm is not None:
            attention = self._norm(attention, layer.attention_output_norm)
        if self._spec.is_parallel:
            answer = self._mlp(index, self._norm(x, layer.mlp_norm), count) + attention
        else:
            normed, x = self._add_norm(attention, x, layer.mlp_norm)
            answer = self._mlp(index, normed, count)
        return self._add_norm(answer, x, next_norm)

    def _mlp(self, index: int, normed: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
        layer, experts = self._layers[index], self._experts[index]
        if experts is not None:
            return self.collective.all_reduce(self._mixture(index, normed, experts, layer.mlp, count))
        assert layer.mlp is not None, "a dense layer has an MLP"
        y = self.collective.all_reduce(layer.mlp.down(layer.mlp.inner(normed)))
        return y if layer.mlp_output_norm is None else self._norm(y, layer.mlp_output_norm)

    def _norm(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        epsilon = self._spec.norm_epsilon
        if norm.bias is None:
            return self._elementwise.norm(x, norm.weight, epsilon)
        return functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, epsilon)

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of the sum, the sum)."""
        if norm.bias is None:
            return self._elementwise.add_norm(x, residual, norm.weight, self._spec.norm_epsilon)
        total = x + residual
        return self._norm(total, norm), total

    def _head_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns x normalised in the dtype of the weight. The result has the dtype of x."""
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, self._spec.norm_epsilon).to(x.dtype)
