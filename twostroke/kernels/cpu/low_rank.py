"""Adapters in the form in which the native forward pass adds them to its products."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class NativeLowRank(ctypes.Structure):
    """`LowRank` of native/low_rank.h, field by field."""

    _fields_ = (
        ("a", _POINTER),
        ("b", _POINTER),
        ("inner", _NUMBER),
        ("inputs", _NUMBER),
        ("outputs", _NUMBER),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_float),
    )


PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class NativeAdapterLayer(ctypes.Structure):
    """`AdapterLayer` of native/low_rank.h."""

    _fields_ = tuple((name, NativeLowRank) for name in PROJECTIONS)


@dataclass(frozen=True, slots=True, eq=False)
class LowRankTensors:
    a: torch.Tensor
    """[inner, inputs]"""
    b: torch.Tensor
    """[outputs, inner]"""


class NativeAdapter:
    """One adapter in bfloat16; it must live as long as a forward pass knows its address."""

    def __init__(self, layers: int, parts: Mapping[tuple[int, str], LowRankTensors], scale: float) -> None:
        self._keep: list[Any] = []
        self._layers = (NativeAdapterLayer * layers)()
        for (layer, name), part in parts.items():
            a, b = part.a.bfloat16().contiguous(), part.b.bfloat16().T.contiguous()
            self._keep += [a, b]
            sizes = {"inner": a.shape[0], "inputs": a.shape[1], "outputs": b.shape[1]}
            native = NativeLowRank(a=a.data_ptr(), b=b.data_ptr(), scale=scale, **sizes)
            setattr(self._layers[layer], name, native)
        self.address = ctypes.addressof(self._layers)
