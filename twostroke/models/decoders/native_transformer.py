"""The same decoder as `Transformer`, as one native call per step on a CPU. It needs the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.forward import (
    NativeCollective,
    NativeExpert,
    NativeExperts,
    NativeForward,
    NativeLatents,
    NativeLayer,
    NativeModel,
    NativeNorm,
)
from twostroke.kernels.cpu.linear import NativeLinear, PanelLinear
from twostroke.kernels.pools.parted_pool import parts_of
from twostroke.kernels.products.linear import ActivatedProduct, Linear
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.decoders.mixture import counters
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.products import Experts, Latents, LayerWeights, ModelWeights
from twostroke.models.weights.tensors import NormWeights


class NativeTransformer:
    """A decoder of weights that `NativeLinears` has packed, over the pages of an attention backend."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        backend: NativeAttention,
        kernels: Kernels,
        *,
        is_deterministic: bool = False,
        collective: Collective | None = None,
    ) -> None:
        self._backend = backend
        self._collective = collective or Alone()
        self.expands_prompts = not is_deterministic and spec.latents is not None and _has_bfloat16_pages(backend)
        """Whether long chunks attend to keys and values that are expanded from latents, which gives their results other
        bits."""
        self.expert_load, tokens = counters(spec)
        if not self.expands_prompts:
            weights = replace(weights, layers=tuple(map(_absorbing, weights.layers)))
        native = _NativeWeights(spec, weights, tokens)
        head = None if weights.head is None else _packed(weights.head)
        self._forward = NativeForward(
            kernels,
            backend.team,
            native.model(self._collective.native),
            native,
            head=head,
            collective=self._collective.native,
        )

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, batch: RaggedBatch, sample_rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        step = self._backend.begin(batch)
        logits = self._forward(tokens.int(), step, sample_rows, batch.kernels, batch.added)
        return None if logits is None else self._collective.gather(logits)


def _has_bfloat16_pages(backend: NativeAttention) -> bool:
    return all(part.form.name == "bfloat16" for part in parts_of(backend.pool))


def _absorbing(layer: LayerWeights) -> LayerWeights:
    """Returns the layer without the product that expands prompts."""
    return layer if layer.latents is None else replace(layer, latents=replace(layer.latents, up=None))


class _NativeWeights:
    """The structs through which native kernels read weights, and all memory that these point into."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, tokens: Mapping[int, torch.Tensor]) -> None:
        """`tokens` has an int64 tensor [experts] for each layer with experts, in which the kernel counts."""
        self._spec = spec
        self._weights = weights
        self._tokens = tokens
        self._keep: list[Any] = []

    def model(self, collective: NativeCollective | None) -> NativeModel:
        spec, weights = self._spec, self._weights
        table = weights.embedding
        plain = table if isinstance(table, torch.Tensor) else None
        assert plain is None or plain.is_contiguous(), "the kernel walks it by index"
        layers = self._array(NativeLayer, [self._layer(index, each) for index, each in enumerate(weights.layers)])
        return NativeModel(
            embedding=None if plain is None else plain.data_ptr(),
            table=None if isinstance(table, torch.Tensor) else ctypes.pointer(_packed(table).native),
            layers=layers,
            layer_count=len(layers),
            norm=self._norm(weights.norm),
            head=_pointer(weights.head),
            hidden=len(weights.norm.weight),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            attended=spec.attended_width,
            epsilon=spec.norm_epsilon,
            positions=None if weights.positions is None else weights.positions.data_ptr(),
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=torch.bfloat16).item(),
            final_softcap=spec.final_softcap or 0,
            is_parallel=spec.is_parallel,
            collective=None if collective is None else collective.address,
        )

    def _layer(self, index: int, layer: LayerWeights) -> NativeLayer:
        output_norm, down_norm = layer.attention_output_norm, layer.mlp_output_norm
        return NativeLayer(
            attention_norm=self._norm(layer.attention_norm),
            qkv=_packed(layer.qkv).native,
            q_norm=self._floats(layer.q_norm),
            k_norm=self._floats(layer.k_norm),
            output=_packed(layer.attention_output).native,
            mlp_norm=self._norm(layer.mlp_norm),
            inner=NativeLinear() if layer.mlp is None else _packed(layer.mlp.inner).native,
            down=NativeLinear() if layer.mlp is None else _packed(layer.mlp.down).native,
            output_norm=None if output_norm is None else self._floats(output_norm.weight),
            down_norm=None if down_norm is None else self._floats(down_norm.weight),
            experts=None if layer.experts is None else self._experts(index, layer.experts, layer.mlp is not None),
            sinks=self._floats(layer.sinks),
            latents=None if layer.latents is None else self._latents(layer.latents),
        )

    def _latents(self, latents: Latents) -> Any:
        spec = self._spec.latents
        assert spec is not None
        native = NativeLatents(
            projected=next(iter(self._spec.attention_inputs.values())),
            latent_dim=spec.latent_dim,
            plain_dim=spec.plain_dim,
            rope_dim=spec.rope_dim,
            value_dim=spec.value_dim,
            epsilon=spec.norm_epsilon,
            norm=self._floats(latents.norm),
            query_norm=self._floats(latents.query_norm),
            queries=_pointer(latents.queries),
            absorb=self._array(NativeLinear, [_packed(product).native for product in latents.absorb]),
            expand=self._array(NativeLinear, [_packed(product).native for product in latents.expand]),
            up=_pointer(latents.up),
        )
        self._keep.append(native)
        return ctypes.pointer(native)

    def _experts(self, index: int, experts: Experts, has_shared: bool) -> Any:
        spec, tokens = self._spec.experts, self._tokens[index]
        assert spec is not None
        assert tokens.dtype == torch.int64, "the kernel counts in these"
        pairs = [NativeExpert(inner=_packed(mlp.inner).native, down=_packed(mlp.down).native) for mlp in experts.table]
        native = NativeExperts(
            router=_packed(experts.router).native,
            table=self._array(NativeExpert, pairs),
            first=experts.first,
            held=len(pairs),
            count=len(tokens),
            per_token=spec.per_token,
            tokens=tokens.data_ptr(),
            correction=self._floats(experts.correction),
            groups=spec.groups,
            groups_per_token=spec.groups_per_token,
            scaling=spec.scaling,
            is_normalised=spec.is_normalised,
            has_shared=has_shared,
            has_shared_gate=spec.has_shared_gate,
        )
        self._keep.append(native)
        return ctypes.pointer(native)

    def _array(self, kind: Any, each: Sequence[Any]) -> Any:
        array = (kind * len(each))(*each)
        self._keep.append(array)
        return array

    def _norm(self, norm: NormWeights) -> NativeNorm:
        return NativeNorm(self._floats(norm.weight), self._floats(norm.bias))

    def _floats(self, weight: torch.Tensor | None) -> int | None:
        if weight is None:
            return None
        self._keep.append(weight.float())
        return int(self._keep[-1].data_ptr())


def _pointer(linear: Linear | None) -> Any:
    return None if linear is None else ctypes.pointer(_packed(linear).native)


def _packed(linear: Linear | ActivatedProduct) -> PanelLinear:
    assert isinstance(linear, PanelLinear), "the native forward pass takes packed weights"
    return linear
