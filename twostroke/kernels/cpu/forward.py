"""All layers of a decoder in one native call, which holds no lock of Python's."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from twostroke.kernels.cpu.attention import NativeAttentionStep
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import NativeLinear, PanelLinear
from twostroke.kernels.cpu.team import Team
from twostroke.observability.profiler import KernelRecords

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class NativeNorm(ctypes.Structure):
    """`Norm` of native/fused.h, field by field."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class NativeExpert(ctypes.Structure):
    """`Expert` of native/experts.h, field by field."""

    _fields_ = (("inner", NativeLinear), ("down", NativeLinear))


class NativeExperts(ctypes.Structure):
    """`Experts` of native/experts.h."""

    _fields_ = (
        ("router", NativeLinear),
        ("table", ctypes.POINTER(NativeExpert)),
        ("first", _NUMBER),
        ("held", _NUMBER),
        ("count", _NUMBER),
        ("per_token", _NUMBER),
        ("tokens", _POINTER),
        ("correction", _POINTER),
        ("groups", _NUMBER),
        ("groups_per_token", _NUMBER),
        ("scaling", ctypes.c_float),
        ("is_normalised", ctypes.c_int32),
        ("has_shared", ctypes.c_int32),
        ("has_shared_gate", ctypes.c_int32),
    )


class NativeLatents(ctypes.Structure):
    """`Latents` of native/forward.cpp, field by field."""

    _fields_ = (
        ("projected", _NUMBER),
        ("latent_dim", _NUMBER),
        ("plain_dim", _NUMBER),
        ("rope_dim", _NUMBER),
        ("value_dim", _NUMBER),
        ("epsilon", ctypes.c_float),
        ("norm", _POINTER),
        ("query_norm", _POINTER),
        ("queries", ctypes.POINTER(NativeLinear)),
        ("absorb", ctypes.POINTER(NativeLinear)),
        ("expand", ctypes.POINTER(NativeLinear)),
        ("up", ctypes.POINTER(NativeLinear)),
    )


class NativeLayer(ctypes.Structure):
    """`Layer` of native/forward.cpp, field by field."""

    _fields_ = (
        ("attention_norm", NativeNorm),
        ("qkv", NativeLinear),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("output", NativeLinear),
        ("mlp_norm", NativeNorm),
        ("inner", NativeLinear),
        ("down", NativeLinear),
        ("output_norm", _POINTER),
        ("down_norm", _POINTER),
        ("experts", ctypes.POINTER(NativeExperts)),
        ("sinks", _POINTER),
        ("latents", ctypes.POINTER(NativeLatents)),
    )


class NativeModel(ctypes.Structure):
    """`Model` of native/forward.cpp."""

    _fields_ = (
        ("embedding", _POINTER),
        ("table", ctypes.POINTER(NativeLinear)),
        ("layers", ctypes.POINTER(NativeLayer)),
        ("layer_count", _NUMBER),
        ("norm", NativeNorm),
        ("head", ctypes.POINTER(NativeLinear)),
        ("positions", _POINTER),
        ("hidden", _NUMBER),
        ("heads", _NUMBER),
        ("kv_heads", _NUMBER),
        ("head_dim", _NUMBER),
        ("attended", _NUMBER),
        ("epsilon", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("final_softcap", ctypes.c_float),
        ("is_parallel", ctypes.c_int32),
        ("collective", _POINTER),
    )


class NativeCall(ctypes.Structure):
    """`Call` of native/forward.cpp."""

    _fields_ = (
        ("tokens", _POINTER),
        ("rows", _NUMBER),
        ("sampled", _POINTER),
        ("samples", _NUMBER),
        ("logits", _POINTER),
        ("steps", _POINTER),
        ("places", _POINTER),
        ("kernels", _POINTER),
        ("added", _POINTER),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ForwardNorm:
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    """None for an RMS norm."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardExperts:
    """The experts of a layer."""

    router: PanelLinear
    """hidden -> a logit of each expert, then that of the shared expert's gate"""
    table: Sequence[tuple[PanelLinear, PanelLinear]]
    """The products of each expert that is held here, before and after the activation. All have the same shapes."""
    first: int = 0
    """The number of the first one in the table."""
    per_token: int
    is_normalised: bool
    """Whether the weights of a row's experts sum up to 1."""
    tokens: torch.Tensor
    """int64 [experts]: rows that each was ever chosen for, which the kernel counts."""
    correction: torch.Tensor | None = None
    """float32 [experts], added to the sigmoids of logits when experts are chosen; None where scores are a softmax."""
    groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    """Factor of the weights of a row's experts."""
    has_shared_gate: bool = True


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardLatents:
    """What makes queries, keys and values of latents."""

    projected: int
    """Numbers of all queries, or of their latent: the first outputs of `qkv`."""
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    epsilon: float
    norm: torch.Tensor
    query_norm: torch.Tensor | None
    queries: PanelLinear | None
    """From their latent; None, as the norm is, where `qkv` makes queries."""
    absorb: Sequence[PanelLinear]
    """plain_dim -> latent_dim, of each head"""
    expand: Sequence[PanelLinear]
    """latent_dim -> value_dim, of each head"""
    up: PanelLinear | None
    """latent_dim -> plain_dim, then value_dim, of each head in turn; None where no prompt is to be expanded"""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardLayer:
    attention_norm: ForwardNorm
    qkv: PanelLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: PanelLinear
    mlp_norm: ForwardNorm
    inner: PanelLinear | None
    """None, as `down` is, where the layer has experts and no shared one."""
    down: PanelLinear | None
    experts: ForwardExperts | None = None
    output_norm: torch.Tensor | None = None
    """RMS norms of what attention and MLP add to the residual stream: both or neither."""
    down_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    """[heads] one more score of each head's softmax. The value of that score is zero."""
    latents: ForwardLatents | None = None
    """None where pages hold keys and values."""


class NativeCollective(Protocol):
    """The processes that compute a model together, as native kernels know them."""

    @property
    def address(self) -> int | None:
        """The address of the group in shared memory."""

    def check(self, met: int) -> None:
        """Raises EngineLost where a kernel returned that others did not come."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardModel:
    """What a forward pass computes with: bfloat16 tensors and packed weights."""

    embedding: torch.Tensor | PanelLinear
    """bfloat16 [vocab, hidden], or the product with it in a file's form."""
    layers: Sequence[ForwardLayer]
    norm: ForwardNorm
    head: PanelLinear | None
    heads: int
    kv_heads: int
    head_dim: int
    attended: int
    """Numbers of what a row's heads attended to, together."""
    epsilon: float
    positions: torch.Tensor | None = None
    """Learned vectors [positions, hidden]."""
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    is_parallel: bool = False
    """Whether attention and MLP of a layer have the same input."""
    collective: NativeCollective | None = None
    """Those that compute the rest of each layer; None where all of it is computed here."""


class NativeForward:
    """Weights and workspace; one call at a time."""

    def __init__(self, kernels: Kernels, team: Team | None, model: ForwardModel) -> None:
        self._run = kernels.function(
            "twostroke_forward_run", (_POINTER, _POINTER, ctypes.POINTER(NativeCall)), ctypes.c_int32
        )
        self._team = team
        self._head = model.head
        self._collective = model.collective
        table = model.embedding if isinstance(model.embedding, PanelLinear) else None
        plain = model.embedding if isinstance(model.embedding, torch.Tensor) else None
        assert plain is None or plain.is_contiguous(), "the kernel walks it by index"
        self._keep: list[Any] = [model]
        """What the native model points into."""
        layers = (NativeLayer * len(model.layers))(*(self._layer(layer) for layer in model.layers))
        self._keep.append(layers)
        native = NativeModel(
            embedding=None if plain is None else plain.data_ptr(),
            table=None if table is None else ctypes.pointer(table.native),
            layers=layers,
            layer_count=len(layers),
            norm=self._row_norm(model.norm),
            head=None if model.head is None else ctypes.pointer(model.head.native),
            hidden=len(model.norm.weight),
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            attended=model.attended,
            epsilon=model.epsilon,
            positions=None if model.positions is None else model.positions.data_ptr(),
            embedding_scale=model.embedding_scale,
            final_softcap=model.final_softcap or 0,
            is_parallel=model.is_parallel,
            collective=None if model.collective is None else model.collective.address,
        )
        new = kernels.function("twostroke_forward_new", (ctypes.POINTER(NativeModel),), _POINTER)
        self._address = new(native)
        weakref.finalize(self, kernels.function("twostroke_forward_free", (_POINTER,)), self._address)

    def __call__(
        self,
        tokens: torch.Tensor,
        steps: NativeAttentionStep,
        sampled: torch.Tensor | None,
        kernels: KernelRecords | None = None,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns float32 logits [len(sampled), vocab] of those rows; None for `sampled` ends with the last layer's KV.

        `steps` are those of the attention. Each kernel is recorded in `kernels`. `added`: int64 [tokens], the address
        of what native/low_rank.h adds to each row, layer by layer, 0 for nothing.
        """
        assert tokens.dtype == torch.int32, "the kernel walks these by index"
        call = NativeCall(tokens=tokens.data_ptr(), rows=len(tokens))
        call.steps, call.places = steps.address, steps.places_address
        call.kernels = None if kernels is None else ctypes.addressof(kernels)
        call.added = None if added is None else added.data_ptr()
        logits = None
        if sampled is not None:
            assert self._head is not None, "sampling on a worker without a head"
            assert sampled.dtype == torch.int64
            logits = torch.empty(len(sampled), self._head.outputs)
            call.sampled, call.samples, call.logits = sampled.data_ptr(), len(sampled), logits.data_ptr()
        met = self._run(self._address, None if self._team is None else self._team.address, call)
        if self._collective is not None:
            self._collective.check(met)
        return logits

    def _layer(self, layer: ForwardLayer) -> NativeLayer:
        return NativeLayer(
            attention_norm=self._row_norm(layer.attention_norm),
            qkv=layer.qkv.native,
            q_norm=self._floats(layer.q_norm),
            k_norm=self._floats(layer.k_norm),
            output=layer.output.native,
            mlp_norm=self._row_norm(layer.mlp_norm),
            inner=NativeLinear() if layer.inner is None else layer.inner.native,
            down=NativeLinear() if layer.down is None else layer.down.native,
            experts=None if layer.experts is None else ctypes.pointer(self._experts(layer.experts, layer)),
            output_norm=self._floats(layer.output_norm),
            down_norm=self._floats(layer.down_norm),
            sinks=self._floats(layer.sinks),
            latents=None if layer.latents is None else ctypes.pointer(self._latents(layer.latents)),
        )

    def _latents(self, latents: ForwardLatents) -> NativeLatents:
        absorb, expand = (
            (NativeLinear * len(products))(*(product.native for product in products))
            for products in (latents.absorb, latents.expand)
        )
        native = NativeLatents(
            projected=latents.projected,
            latent_dim=latents.latent_dim,
            plain_dim=latents.plain_dim,
            rope_dim=latents.rope_dim,
            value_dim=latents.value_dim,
            epsilon=latents.epsilon,
            norm=self._floats(latents.norm),
            query_norm=self._floats(latents.query_norm),
            queries=None if latents.queries is None else ctypes.pointer(latents.queries.native),
            absorb=absorb,
            expand=expand,
            up=None if latents.up is None else ctypes.pointer(latents.up.native),
        )
        self._keep += [absorb, expand, native]
        return native

    def _experts(self, experts: ForwardExperts, layer: ForwardLayer) -> NativeExperts:
        assert experts.tokens.dtype == torch.int64, "the kernel counts in these"
        table = (NativeExpert * len(experts.table))(
            *(NativeExpert(inner=inner.native, down=down.native) for inner, down in experts.table)
        )
        native = NativeExperts(
            router=experts.router.native,
            table=table,
            first=experts.first,
            held=len(table),
            count=len(experts.tokens),
            per_token=experts.per_token,
            tokens=experts.tokens.data_ptr(),
            correction=self._floats(experts.correction),
            groups=experts.groups,
            groups_per_token=experts.groups_per_token,
            scaling=experts.scaling,
            is_normalised=experts.is_normalised,
            has_shared=layer.inner is not None,
            has_shared_gate=experts.has_shared_gate,
        )
        self._keep += [table, native]
        return native

    def _row_norm(self, norm: ForwardNorm) -> NativeNorm:
        return NativeNorm(self._floats(norm.weight), self._floats(norm.bias))

    def _floats(self, weight: torch.Tensor | None) -> int | None:
        if weight is None:
            return None
        self._keep.append(weight.float())
        return int(self._keep[-1].data_ptr())
