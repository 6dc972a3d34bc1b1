"""Runs all layers of a decoder in one native call, which does not hold the GIL."""

from __future__ import annotations

import ctypes
import weakref
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


class NativeCollective(Protocol):
    """The group of processes that compute a model together, for native kernels."""

    @property
    def address(self) -> int | None:
        """The address of the group in shared memory."""

    def check(self, met: int) -> None:
        """Raises EngineLost where a kernel returned that another process did not take part."""


class NativeForward:
    """The weights and the workspace of a decoder. Only one call runs at a time."""

    def __init__(
        self,
        kernels: Kernels,
        team: Team | None,
        model: NativeModel,
        keep: Any,
        *,
        head: PanelLinear | None,
        collective: NativeCollective | None,
    ) -> None:
        """`keep` is all that the model points into. `collective` connects the processes that compute the rest of each
        layer; None where there are no others.

        `head` is the model's, or None where nothing is sampled.
        """
        self._run = kernels.function(
            "twostroke_forward_run", (_POINTER, _POINTER, ctypes.POINTER(NativeCall)), ctypes.c_int32
        )
        self._team = team
        self._head = head
        self._collective = collective
        self._keep = keep
        new = kernels.function("twostroke_forward_new", (ctypes.POINTER(NativeModel),), _POINTER)
        self._address = new(model)
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

        `steps` is the attention step. Each kernel is recorded in `kernels`. `added`: int64 [tokens], for each row the
        address of the structs of native/low_rank.h that add to its products, 0 for none.
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
