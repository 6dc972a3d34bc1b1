"""The weights of a model on one device. Projections of the same input are stacked, so that one product serves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from twostroke.kernels.products.stored import Matrix, Weight, expanded
from twostroke.models.spec import ExpertSpec, LatentSpec, ModelSpec


class WeightSource(Protocol):
    """The source of tensors: a model's files, or a generator of random ones."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor of this name, on the device and in the dtype of the model."""

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Returns the matrix as plain numbers, or as it is stored if this source keeps codes."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    weight: Weight
    """[out, in]"""
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    weight: torch.Tensor
    """[hidden]; float32 where the model's norms multiply in float32."""
    bias: torch.Tensor | None = None
    """None for RMS norms."""

    def detached(self) -> NormWeights:
        """Returns a copy that does not lie in the model's files."""
        return NormWeights(self.weight.clone(), None if self.bias is None else self.bias.clone())


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    inner: DenseWeights
    """hidden -> gate, then up; or the only product before the activation"""
    down: DenseWeights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The experts of a layer."""

    router: torch.Tensor
    """[experts, hidden], and a last row for the gate of a shared expert"""
    table: tuple[MlpWeights, ...]
    """The weights of each expert that is held here."""
    router_bias: torch.Tensor | None = None
    """[experts]"""
    correction: torch.Tensor | None = None
    """float32 [experts], added to scores when experts are chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """The weights that make queries, keys and values from latents, in a layer that attends to latents."""

    norm: torch.Tensor
    """[latent_dim]"""
    query_norm: torch.Tensor | None
    """[query_latent_dim]"""
    queries: DenseWeights | None
    """query_latent_dim -> heads. Like the norm, None where queries are made from the hidden state."""
    absorb: tuple[torch.Tensor, ...]
    """[latent_dim, plain_dim] of each head: maps its query to a vector that attends to latents."""
    expand: tuple[torch.Tensor, ...]
    """[value_dim, latent_dim] of each head: maps a sum of latents to a sum of values."""
    up: torch.Tensor
    """[heads * (plain_dim + value_dim), latent_dim]: maps a latent to each head's key and value, as in the files."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayer:
    attention_norm: NormWeights
    qkv: DenseWeights
    """hidden -> q heads, then k heads, then v heads. With latents: q heads or their latent, then what pages hold"""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: DenseWeights
    mlp_norm: NormWeights
    mlp: MlpWeights | None
    """None where the layer has experts and no shared one."""
    experts: ExpertWeights | None = None
    attention_output_norm: NormWeights | None = None
    """The norm of the attention output, before it is added to the residual stream."""
    mlp_output_norm: NormWeights | None = None
    sinks: torch.Tensor | None = None
    """float32 [heads]: an additional score of each head's softmax, whose value is zero"""
    latents: LatentWeights | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """The experts of a layer in one tensor for each product."""

    router: torch.Tensor
    """float32 [experts, hidden], and a last row for the gate of a shared expert"""
    router_bias: torch.Tensor | None
    """float32 [experts]"""
    correction: torch.Tensor | None
    inner: DenseWeights
    """[experts, out, hidden] and [experts, out]"""
    down: DenseWeights
    """[experts, hidden, width] and [experts, hidden]"""

    @classmethod
    def of(cls, experts: ExpertWeights) -> StackedExperts:
        """Stacks the weights as plain numbers. Raises ConfigError for quantised ones that cannot be read."""
        bias = experts.router_bias
        return cls(
            router=experts.router.float(),
            router_bias=None if bias is None else bias.float(),
            correction=experts.correction,
            inner=_stacked_dense([mlp.inner for mlp in experts.table], experts.router),
            down=_stacked_dense([mlp.down for mlp in experts.table], experts.router),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeights:
    embedding: torch.Tensor
    layers: tuple[DeviceLayer, ...]
    norm: NormWeights
    head: Weight | None
    """None on a worker that never samples."""
    positions: torch.Tensor | None = None
    """Learned vectors [positions, hidden]."""
    experts: tuple[StackedExperts | None, ...] = ()
    """The experts of each layer. `DeviceLayer.experts` is None for all of them."""


def take_weights(source: WeightSource, spec: ModelSpec, *, with_head: bool) -> DeviceWeights:
    """Returns the weights of a model for one device. Raises what the source raises."""
    words = (spec.vocab_size, spec.hidden_size)
    embedding = source.take("model.embed_tokens.weight", *words)
    layers, experts = [], []
    for index in range(spec.layers):  # one by one: stacking a layer's experts takes their memory twice
        layer = take_layer(source, index, spec)
        experts.append(None if layer.experts is None else StackedExperts.of(layer.experts))
        layers.append(replace(layer, experts=None))
    norm = take_norm(source, "model.norm", spec)
    head = None
    if with_head:
        head = _head(source, spec, embedding)
    return DeviceWeights(embedding, tuple(layers), norm, head, take_positions(source, spec), tuple(experts))


def _head(source: WeightSource, spec: ModelSpec, embedding: torch.Tensor) -> Weight:
    """Returns the head, or its rows for the tokens whose logits are computed here."""
    words = slice(spec.vocabulary.start, spec.vocabulary.stop)
    if spec.tie_word_embeddings:
        return embedding[words]
    matrix = source.take_matrix("lm_head.weight", spec.vocab_size, spec.hidden_size)
    if spec.share is None:
        return _weight([matrix])
    assert isinstance(matrix, torch.Tensor), "matrices of codes are not shared out"
    return matrix[words].clone()  # a view would keep the rows of other shares in memory


def take_positions(source: WeightSource, spec: ModelSpec) -> torch.Tensor | None:
    """Returns the learned positions, if the model has them. Raises what the source raises."""
    shape = (spec.max_position_embeddings, spec.hidden_size)
    return source.take("model.position_embeddings.weight", *shape) if spec.has_position_table else None


def take_layer(source: WeightSource, layer: int, spec: ModelSpec) -> DeviceLayer:
    """Returns the weights of one layer. Raises what the source raises."""
    prefix, hidden = f"model.layers.{layer}", spec.hidden_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    experts = spec.experts_of(layer)
    qkv = [(f"{attention}.{part}", rows) for part, rows in spec.attention_inputs.items()]
    output = [(f"{attention}.o_proj", hidden)]
    of_outputs = [
        take_norm(source, f"{prefix}.{part}_output_norm", spec) if spec.has_output_norms else None
        for part in ("attention", "mlp")
    ]
    return DeviceLayer(
        attention_norm=take_norm(source, f"{prefix}.input_layernorm", spec),
        qkv=_take_dense(source, qkv, hidden, has_bias=spec.qkv_bias),
        q_norm=source.take(f"{attention}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=source.take(f"{attention}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        attention_output=_take_dense(source, output, spec.attended_width, has_bias=spec.attention_output_bias),
        mlp_norm=take_norm(source, f"{prefix}.post_attention_layernorm", spec),
        mlp=_take_mlp(source, mlp, spec.intermediate_size, spec) if experts is None else _shared(source, mlp, spec),
        experts=None if experts is None else _take_experts(source, mlp, experts, spec),
        attention_output_norm=of_outputs[0],
        mlp_output_norm=of_outputs[1],
        sinks=source.take(f"{attention}.sinks", spec.heads).float() if spec.has_sinks else None,
        latents=None if spec.latents is None else _take_latents(source, attention, spec, spec.latents),
    )


def _take_latents(source: WeightSource, name: str, spec: ModelSpec, latents: LatentSpec) -> LatentWeights:
    latent_dim, query_latent_dim = latents.latent_dim, latents.query_latent_dim
    rows = latents.plain_dim + latents.value_dim
    heads = source.take(f"{name}.kv_b_proj.weight", spec.heads * rows, latent_dim).view(spec.heads, rows, latent_dim)
    query_norm = queries = None
    if query_latent_dim is not None:
        query_norm = source.take(f"{name}.q_a_layernorm.weight", query_latent_dim)
        queries = _take_dense(
            source, [(f"{name}.q_b_proj", spec.heads * latents.query_dim)], query_latent_dim, has_bias=False
        )
    return LatentWeights(
        norm=source.take(f"{name}.kv_a_layernorm.weight", latent_dim),
        query_norm=query_norm,
        queries=queries,
        absorb=tuple(head[: latents.plain_dim].t().contiguous() for head in heads),
        expand=tuple(head[latents.plain_dim :].contiguous() for head in heads),
        up=heads.flatten(0, 1),
    )


def _take_mlp(source: WeightSource, name: str, width: int, spec: ModelSpec) -> MlpWeights:
    firsts = ("gate", "up") if spec.activation.is_gated else ("up",)
    inner = [(f"{name}.{part}_proj", width) for part in firsts]
    down = [(f"{name}.down_proj", spec.hidden_size)]
    return MlpWeights(
        _take_dense(source, inner, spec.hidden_size, has_bias=spec.mlp_bias),
        _take_dense(source, down, width, has_bias=spec.mlp_bias),
    )


def _shared(source: WeightSource, name: str, spec: ModelSpec) -> MlpWeights | None:
    assert spec.experts is not None
    width = spec.experts.shared_width
    return _take_mlp(source, f"{name}.shared_expert", width, spec) if width else None


def _take_experts(source: WeightSource, name: str, experts: ExpertSpec, spec: ModelSpec) -> ExpertWeights:
    router = [source.take(f"{name}.gate.weight", experts.count, spec.hidden_size)]
    if experts.shared_width and experts.has_shared_gate:
        router.append(source.take(f"{name}.shared_expert_gate.weight", 1, spec.hidden_size))
    return ExpertWeights(
        _stacked(router),
        tuple(_take_mlp(source, f"{name}.experts.{expert}", experts.width, spec) for expert in spec.held_experts),
        source.take(f"{name}.gate.bias", experts.count) if experts.has_router_bias else None,
        source.take(f"{name}.gate.e_score_correction_bias", experts.count) if experts.is_sigmoid else None,
    )


def take_norm(source: WeightSource, name: str, spec: ModelSpec) -> NormWeights:
    """Returns the weights of one norm. Raises what the source raises."""
    weight = source.take(f"{name}.weight", spec.hidden_size)
    return NormWeights(weight, source.take(f"{name}.bias", spec.hidden_size) if spec.is_layer_norm else None)


def _take_dense(
    source: WeightSource, parts: Sequence[tuple[str, int]], columns: int, *, has_bias: bool
) -> DenseWeights:
    """Returns several projections of the same input, stacked in the given order."""
    weight = _weight([source.take_matrix(f"{name}.weight", rows, columns) for name, rows in parts])
    bias = _stacked([source.take(f"{name}.bias", rows) for name, rows in parts]) if has_bias else None
    return DenseWeights(weight, bias)


def _stacked_dense(parts: Sequence[DenseWeights], like: torch.Tensor) -> DenseWeights:
    """Stacks projections. `like` has the dtype and the device of the result."""
    weights = [expanded(part.weight, like)[None] for part in parts]
    biases = [part.bias[None] for part in parts if part.bias is not None]
    return DenseWeights(_stacked(weights), _stacked(biases) if biases else None)


def _weight(parts: Sequence[Matrix]) -> Weight:
    """Returns a weight: one matrix of plain numbers, or a tuple of matrices where any of them is quantised."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return _stacked(tensors) if len(tensors) == len(parts) else tuple(parts)


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors along their first dimension. It does not use `cat`, which loads torch's compiler for tensors on
    the meta device."""
    if len(tensors) == 1:
        return tensors[0]
    counts = [len(tensor) for tensor in tensors]
    stacked = tensors[0].new_empty(sum(counts), *tensors[0].shape[1:])
    for place, tensor in zip(stacked.split_with_sizes(counts), tensors, strict=True):
        place.copy_(tensor)
    return stacked
