"""Products with weights packed for the native kernels: bfloat16, or int8 with a scale per group of inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

from twostroke.kernels.activation import ACTIVATIONS, Activation
from twostroke.kernels.cpu.arena import Arena, PrivateArena
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.packing import GROUP, PANEL, is_quantised
from twostroke.kernels.cpu.team import Team

BFLOAT16, INT8 = 0, 1
"""`Kind` of native/linear.h."""

INTO_BFLOAT16: Final = 0

SERVED: Final = torch.bfloat16
"""The dtype of the activations, and of the weights before they are packed."""


class NativeLinear(ctypes.Structure):
    """`Linear` of native/linear.h, field by field."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("is_gated", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    )


class PanelLinear:
    """One weight in panels. `native` is what other kernels take; it lives as long as this."""

    def __init__(self, product: Callable[..., None], team: Team | None, native: NativeLinear, keep: Any) -> None:
        self.native = native
        self._product = product
        self._team = team
        self._keep = keep
        """The tensors that `native` points into."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == SERVED, "these kernels are for bfloat16"
        short = self.native.inputs - x.shape[1]
        if short:
            x = functional.pad(x, (0, short))
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(len(x), self.native.outputs, dtype=torch.bfloat16)
        team = None if self._team is None else self._team.address
        self._product(team, self.native, x.data_ptr(), x.stride(0), len(x), y.data_ptr(), y.stride(0), INTO_BFLOAT16)
        return y


class NativeLinears:
    """Packs weights for the machine at hand. `is_int8` halves what a step reads, at the price of some exactness."""

    def __init__(
        self, kernels: Kernels, team: Team | None, *, is_int8: bool = False, arena: Arena | None = None
    ) -> None:
        """`arena`: where the packed weights lie; memory of their own where it is None."""
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._product = kernels.function(
            "twostroke_linear",
            (pointer, ctypes.POINTER(NativeLinear), pointer, number, number, pointer, number, ctypes.c_int32),
        )
        self._team = team
        self._is_int8 = is_int8
        self._arena = arena or PrivateArena()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PanelLinear:
        return self._pack(weight, bias, len(weight), None)

    def activated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> PanelLinear:
        """The activation of x W^T + b. If it is gated, the first half of those are gates, the second half values."""
        outputs = len(weight) // activation.width
        if activation.is_gated:
            weight, bias = _interleaved(weight), None if bias is None else _interleaved(bias[:, None])[:, 0]
        return self._pack(weight, bias, outputs, activation)

    def _pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int, activation: Activation | None
    ) -> PanelLinear:
        rows, inputs = weight.shape
        is_int8 = is_quantised(inputs, is_int8=self._is_int8)
        weight = _with_zeros(weight, -rows % PANEL, inputs % 2)
        native = NativeLinear(outputs=outputs, inputs=weight.shape[1], kind=INT8 if is_int8 else BFLOAT16)
        if activation is not None:
            native.is_gated, native.activation = activation.is_gated, 1 + ACTIVATIONS.index(activation.function)
        keep = []
        if is_int8:
            weight, scales, sums = _quantised(weight)
            keep = [self._arena.copy(scales), self._arena.copy(sums)]
            native.scales, native.sums = (tensor.data_ptr() for tensor in keep)
        panels = weight.view(torch.int32).view(len(weight) // PANEL, PANEL, -1).transpose(1, 2)
        keep.append(self._arena.copy(panels))
        native.panels = keep[-1].data_ptr()
        if bias is not None:
            keep.append(functional.pad(bias.float(), (0, -len(bias) % PANEL)))
            native.bias = keep[-1].data_ptr()
        return PanelLinear(self._product, self._team, native, keep)


def _with_zeros(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`weight` with so many rows and columns of zeros behind it; itself where there are none.

    What packs weights works on shapes alone, too (device meta), and there torch loads its compiler for most operators,
    `pad`, `cat` and `stack` among them: a second of time.
    """
    if not rows and not columns:
        return weight
    height, width = weight.shape
    padded = weight.new_zeros(height + rows, width + columns)
    padded[:height, :width].copy_(weight)
    return padded


def _interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Rows of gates, then of the values they let through, as half a panel of each in turn."""
    half, outputs, inputs = PANEL // 2, len(weight) // 2, weight.shape[1]
    if outputs % half:
        padded = weight.new_zeros(2, outputs + -outputs % half, inputs)
        padded[:, :outputs].copy_(weight.view(2, outputs, inputs))
        weight = padded
    return weight.view(2, -1, half, inputs).transpose(0, 1).flatten(0, 2)


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 [rows, inputs], and per panel, group and row the scale and what makes up for inputs shifted by 128."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1) / 127
    values = (groups / scales.clamp_min(1e-30)[..., None]).round().to(torch.int8)
    sums = -128 * values.sum(-1, dtype=torch.int32)
    return values.view(len(weight), -1), _by_panel(scales), _by_panel(sums)


def _by_panel(facts: torch.Tensor) -> torch.Tensor:
    return facts.view(len(facts) // PANEL, PANEL, -1).transpose(1, 2)
