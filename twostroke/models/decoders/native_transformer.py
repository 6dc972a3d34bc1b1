"""The same decoder as `Transformer`, as one native call per step on a CPU that has the kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.forward import (
    ForwardExperts,
    ForwardLatents,
    ForwardLayer,
    ForwardModel,
    ForwardNorm,
    NativeForward,
)
from twostroke.kernels.cpu.linear import PanelLinear
from twostroke.kernels.pools.parted_pool import parts_of
from twostroke.kernels.products.linear import ActivatedProduct, Linear
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.decoders.mixture import counters
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.products import Experts, Latents, LayerWeights, ModelWeights
from twostroke.models.weights.tensors import NormWeights


class NativeTransformer:
    """Weights that `NativeLinears` packed, and the attention over their pages."""

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
        """Whether long chunks attend to keys and values that are made of latents, and so have other bits."""
        self.expert_load, tokens = counters(spec)
        layers = weights.layers if self.expands_prompts else tuple(map(_absorbing, weights.layers))
        model = ForwardModel(
            embedding=weights.embedding if isinstance(weights.embedding, torch.Tensor) else _packed(weights.embedding),
            layers=[
                _layer(layer, spec, None if layer.experts is None else _experts(layer.experts, spec, tokens[index]))
                for index, layer in enumerate(layers)
            ],
            norm=_norm(weights.norm),
            head=None if weights.head is None else _packed(weights.head),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            attended=spec.attended_width,
            epsilon=spec.norm_epsilon,
            positions=weights.positions,
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=torch.bfloat16).item(),
            final_softcap=spec.final_softcap,
            is_parallel=spec.is_parallel,
            collective=self._collective.native,
        )
        self._forward = NativeForward(kernels, backend.team, model)

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


def _layer(layer: LayerWeights, spec: ModelSpec, experts: ForwardExperts | None) -> ForwardLayer:
    return ForwardLayer(
        attention_norm=_norm(layer.attention_norm),
        qkv=_packed(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        output=_packed(layer.attention_output),
        mlp_norm=_norm(layer.mlp_norm),
        inner=None if layer.mlp is None else _packed(layer.mlp.inner),
        down=None if layer.mlp is None else _packed(layer.mlp.down),
        experts=experts,
        output_norm=None if layer.attention_output_norm is None else layer.attention_output_norm.weight,
        down_norm=None if layer.mlp_output_norm is None else layer.mlp_output_norm.weight,
        sinks=layer.sinks,
        latents=None if layer.latents is None else _latents(layer.latents, spec),
    )


def _latents(latents: Latents, spec: ModelSpec) -> ForwardLatents:
    assert spec.latents is not None
    return ForwardLatents(
        projected=next(iter(spec.attention_inputs.values())),
        latent_dim=spec.latents.latent_dim,
        plain_dim=spec.latents.plain_dim,
        rope_dim=spec.latents.rope_dim,
        value_dim=spec.latents.value_dim,
        epsilon=spec.latents.norm_epsilon,
        norm=latents.norm,
        query_norm=latents.query_norm,
        queries=None if latents.queries is None else _packed(latents.queries),
        absorb=[_packed(product) for product in latents.absorb],
        expand=[_packed(product) for product in latents.expand],
        up=None if latents.up is None else _packed(latents.up),
    )


def _experts(experts: Experts, spec: ModelSpec, tokens: torch.Tensor) -> ForwardExperts:
    assert spec.experts is not None
    return ForwardExperts(
        router=_packed(experts.router),
        table=[(_packed(mlp.inner), _packed(mlp.down)) for mlp in experts.table],
        first=experts.first,
        per_token=spec.experts.per_token,
        is_normalised=spec.experts.is_normalised,
        tokens=tokens,
        correction=experts.correction,
        groups=spec.experts.groups,
        groups_per_token=spec.experts.groups_per_token,
        scaling=spec.experts.scaling,
        has_shared_gate=spec.experts.has_shared_gate,
    )


def _norm(norm: NormWeights) -> ForwardNorm:
    return ForwardNorm(norm.weight, norm.bias)


def _packed(linear: Linear | ActivatedProduct) -> PanelLinear:
    assert isinstance(linear, PanelLinear), "the native forward pass takes packed weights"
    return linear
