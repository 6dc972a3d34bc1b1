"""Matrix products with weights packed for the native kernels: bfloat16, int8 with a scale per group of inputs, or
codes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from twostroke.kernels.activation import ACTIVATIONS, Activation
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.cpu.weights.arena import Arena, PrivateArena
from twostroke.kernels.cpu.weights.packing import GROUP, PANEL, is_quantised
from twostroke.kernels.cpu.weights.stored_packing import PackedMatrix, ordered
from twostroke.kernels.layout import MINS, SCALES, Layout
from twostroke.kernels.products.linear import Adjust, unchanged
from twostroke.kernels.products.stored import Matrix, StoredMatrix, Weight, can_stack, stacked

BFLOAT16, INT8, CODES, FP8 = 0, 1, 2, 3
"""`Kind` of native/linear.h."""

INTO_BFLOAT16: Final = 0

SERVED: Final = torch.bfloat16
"""The dtype of the activations, and of the weights before they are packed."""


class NativeLayout(ctypes.Structure):
    """`Layout` of native/linear.h, field by field."""

    _fields_ = (
        ("bits", ctypes.c_int32),
        ("is_fp4", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("scales", ctypes.c_int32),
        ("mins", ctypes.c_int32),
    )

    @classmethod
    def of(cls, layout: Layout) -> NativeLayout:
        return cls(
            bits=layout.bits,
            is_fp4=layout.is_fp4,
            group=layout.group,
            offset=12 if layout.is_fp4 else layout.offset,  # in halves, FP4's numbers plus 12 are unsigned
            scales=SCALES.index(layout.scales),
            mins=MINS.index(layout.mins),
        )


class NativeClamp(ctypes.Structure):
    """`Clamp` of native/linear.h."""

    _fields_ = (("alpha", ctypes.c_float), ("limit", ctypes.c_float))


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
        ("clamp", NativeClamp),
        ("mins", ctypes.c_void_p),
        ("supers", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("layout", NativeLayout),
    )


class PanelLinear:
    """One weight in panels. `native` is the struct that other kernels take. It is valid as long as this object
    lives."""

    def __init__(
        self,
        product: Callable[..., None],
        team: Team | None,
        native: NativeLinear,
        keep: Any,
        outputs: int | None = None,
    ) -> None:
        """`outputs` are those of a chain of products. None: the chain is only `native`."""
        self.native = native
        self.outputs: int = native.outputs if outputs is None else outputs
        self._product = product
        self._team = team
        self._keep = keep
        """The tensors that `native` points into."""

    def __call__(self, x: torch.Tensor, adjust: Adjust = unchanged) -> torch.Tensor:
        """Computes the product. The native forward pass adjusts rows by itself."""
        assert adjust is unchanged
        assert x.dtype == SERVED, "these kernels are for bfloat16"
        short = self.native.inputs - x.shape[1]
        if short:
            x = functional.pad(x, (0, short))
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(len(x), self.outputs, dtype=torch.bfloat16)
        team = None if self._team is None else self._team.address
        self._product(team, self.native, x.data_ptr(), x.stride(0), len(x), y.data_ptr(), y.stride(0), INTO_BFLOAT16)
        return y


class NativeLinears:
    """Packs weights for this machine. `is_int8` halves the bytes that a step reads, at the price of some precision."""

    def __init__(
        self, kernels: Kernels, team: Team | None, arena: Arena | None = None, *, is_int8: bool = False
    ) -> None:
        """`arena` holds the packed weights. None: private memory does."""
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._product = kernels.function(
            "twostroke_linear",
            (pointer, ctypes.POINTER(NativeLinear), pointer, number, number, pointer, number, ctypes.c_int32),
        )
        self._kernels = kernels
        self._team = team
        self._is_int8 = is_int8
        self._arena = arena or PrivateArena()

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> PanelLinear:
        if isinstance(weight, torch.Tensor):
            return self._pack(weight, bias, len(weight), None)
        parts = _merged(weight)
        sizes = [_rows(part) for part in parts]
        biases = [None] * len(parts) if bias is None else torch.split(bias, sizes)
        products = [
            self._stored(part, of, None) if isinstance(part, StoredMatrix) else self._pack(part, of, len(part), None)
            for part, of in zip(parts, biases, strict=True)
        ]
        for product, following in itertools.pairwise(products):
            product.native.next = ctypes.addressof(following.native)
        first = products[0]
        return PanelLinear(self._product, self._team, first.native, products, sum(sizes))

    def exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PanelLinear:
        """Returns the product in bfloat16, even where others are int8. Callers ask for float32 sums."""
        return self._pack(weight, bias, len(weight), None, may_be_int8=False)

    def activated(self, weight: Weight, bias: torch.Tensor | None, activation: Activation) -> PanelLinear:
        """Returns the product with its activation: f(x W^T + b). If it is gated, the first half of the outputs are
        gates, the second half values."""
        if not isinstance(weight, torch.Tensor):
            merged = _merged(weight)
            if len(merged) == 1 and isinstance(merged[0], StoredMatrix):
                return self._stored(merged[0], bias, activation)
            weight = _stacked_plain(weight)
        outputs = len(weight) // activation.width
        if activation.is_gated:
            weight, bias = _interleaved(weight), None if bias is None else _interleaved(bias[:, None])[:, 0]
        return self._pack(weight, bias, outputs, activation)

    def _pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        outputs: int,
        activation: Activation | None,
        *,
        may_be_int8: bool = True,
    ) -> PanelLinear:
        rows, inputs = weight.shape
        is_int8 = is_quantised(inputs, is_int8=self._is_int8 and may_be_int8)
        weight = _with_zeros(weight, -rows % PANEL, inputs % 2)
        native = NativeLinear(outputs=outputs, inputs=weight.shape[1], kind=INT8 if is_int8 else BFLOAT16)
        if activation is not None:
            _activate(native, activation)
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

    def _stored(self, matrix: StoredMatrix, bias: torch.Tensor | None, activation: Activation | None) -> PanelLinear:
        layout, is_gated = matrix.layout, activation is not None and activation.is_gated
        if not layout.can_pack(matrix.inputs):
            weight = _plain(matrix)
            return self.linear(weight, bias) if activation is None else self.activated(weight, bias, activation)
        self._kernels.need("stored")
        packed = PackedMatrix(matrix, self._arena, is_gated=is_gated)
        native = NativeLinear(
            outputs=matrix.rows // 2 if is_gated else matrix.rows,
            inputs=matrix.inputs,
            kind=FP8 if layout.is_fp8 else CODES,
            panels=_address(packed.codes),
            scales=_address(packed.scales),
            mins=_address(packed.mins),
            supers=_address(packed.supers),
            layout=NativeLayout.of(layout),
        )
        if activation is not None:
            _activate(native, activation)
        keep: list[Any] = [packed]
        for name, each in (("bias", bias), ("factors", matrix.factors)):
            if each is not None:
                keep.append(ordered(each.float(), is_gated=is_gated))
                setattr(native, name, _address(keep[-1]))
        if matrix.order is not None:
            keep.append(matrix.order.int().contiguous())
            native.order = _address(keep[-1])
        return PanelLinear(self._product, self._team, native, keep)


def _activate(native: NativeLinear, activation: Activation) -> None:
    native.is_gated, native.activation = activation.is_gated, 1 + ACTIVATIONS.index(activation.function)
    if activation.clamp is not None:
        native.clamp = NativeClamp(activation.clamp.alpha, activation.clamp.limit)


def _merged(parts: Sequence[Matrix]) -> list[Matrix]:
    """Returns the parts, with neighbours that are stored alike merged into one matrix."""
    merged: list[Matrix] = []
    for neighbours in _alike(parts):
        stored = [part for part in neighbours if isinstance(part, StoredMatrix)]
        plain = [part for part in neighbours if isinstance(part, torch.Tensor)]
        merged.append(stacked(stored) if stored else _stacked_plain(plain))
    return merged


def _alike(parts: Sequence[Matrix]) -> list[list[Matrix]]:
    """Groups neighbouring parts that are stored alike."""
    cut: list[list[Matrix]] = []
    for part in parts:
        if cut and can_stack(cut[-1][-1], part):
            cut[-1].append(part)
        else:
            cut.append([part])
    return cut


def _stacked_plain(parts: Sequence[Matrix]) -> torch.Tensor:
    """Returns the stacked parts as plain numbers; only their shape where one part is on the meta device."""
    is_meta = any(isinstance(part, torch.Tensor) and part.is_meta for part in parts)
    counts = [_rows(part) for part in parts]
    width = parts[0].inputs if isinstance(parts[0], StoredMatrix) else parts[0].shape[1]
    whole = torch.empty(sum(counts), width, dtype=SERVED, device="meta" if is_meta else "cpu")
    for place, part in zip(() if is_meta else torch.split(whole, counts), parts, strict=not is_meta):
        place.copy_(_plain(part))
    return whole


def _plain(part: Matrix) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else part.dense().to(SERVED)


def _rows(part: Matrix) -> int:
    return len(part) if isinstance(part, torch.Tensor) else part.rows


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _with_zeros(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Returns `weight` with this many rows and columns of zeros appended, or `weight` itself where there are none.

    Code that packs weights must also run on the meta device. There torch loads its compiler for most operators, such as
    `pad`, `cat` and `stack`, which takes a second.
    """
    if not rows and not columns:
        return weight
    height, width = weight.shape
    padded = weight.new_zeros(height + rows, width + columns)
    padded[:height, :width].copy_(weight)
    return padded


def _interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Reorders rows, which are gates and then values, so that half a panel of each takes turns."""
    half, outputs, inputs = PANEL // 2, len(weight) // 2, weight.shape[1]
    if outputs % half:
        padded = weight.new_zeros(2, outputs + -outputs % half, inputs)
        padded[:, :outputs].copy_(weight.view(2, outputs, inputs))
        weight = padded
    return weight.view(2, -1, half, inputs).transpose(0, 1).flatten(0, 2)


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns int8 [rows, inputs], and for each panel, group and row the scale and the sum that makes up for inputs
    shifted by 128."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1) / 127
    values = (groups / scales.clamp_min(1e-30)[..., None]).round().to(torch.int8)
    sums = -128 * values.sum(-1, dtype=torch.int32)
    return values.view(len(weight), -1), _by_panel(scales), _by_panel(sums)


def _by_panel(facts: torch.Tensor) -> torch.Tensor:
    return facts.view(len(facts) // PANEL, PANEL, -1).transpose(1, 2)
