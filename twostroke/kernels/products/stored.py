"""Quantised matrices of a file: read when they are packed, or expanded to plain numbers for kernels that do not take
codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from twostroke.kernels.layout import SUPER, Layout

FP4_HALVES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The numbers of FP4 by their codes, times 2."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredNumbers:
    """The content of a stored matrix."""

    codes: torch.Tensor
    """uint8 [rows, inputs], one code each: int8 for signed codes of 8 bits, float8_e4m3fn for FP8."""
    scales: torch.Tensor
    """[rows, groups]"""
    mins: torch.Tensor | None = None
    """[rows, groups]; codes of 0 where the layout has these."""
    supers: torch.Tensor | None = None
    """float16 [rows, inputs / 256, parts]"""


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A matrix [rows, inputs] of a file, in the file's layout."""

    layout: Layout
    rows: int
    inputs: int
    read: Callable[[], StoredNumbers]
    """Reads the content, each time it is called. Raises ConfigError where it cannot be used."""
    factors: torch.Tensor | None = None
    """float32 [rows], powers of two that multiply the rows."""
    order: torch.Tensor | None = None
    """int32 [inputs]: the model's input that each column of codes multiplies; None where that is its own."""

    def scaled(self, factors: torch.Tensor) -> StoredMatrix:
        """Returns the matrix with its rows multiplied by these powers of two."""
        return replace(self, factors=factors if self.factors is None else self.factors * factors)

    def picked(self, rows: torch.Tensor) -> StoredMatrix:
        """Returns the matrix with only these rows, int64 [picked]."""

        def read() -> StoredNumbers:
            fields = (_picked(each, rows) for each in _fields(self.read()))
            return StoredNumbers(*fields)  # type: ignore[arg-type]  # a field stays None or a tensor

        factors = None if self.factors is None else self.factors[rows]
        return replace(self, rows=len(rows), read=read, factors=factors)

    def of_inputs(self, own: range, layout: Layout) -> StoredMatrix:
        """Returns the matrix with only some neighbouring inputs, in the layout from `Layout.of_inputs`."""
        assert self.order is None, "inputs that lie in another order are not neighbours"
        groups = torch.arange(own.start, own.stop, layout.group) // self.layout.group

        def read() -> StoredNumbers:
            whole = self.read()
            return StoredNumbers(
                whole.codes[:, own.start : own.stop].contiguous(),
                whole.scales[:, groups],
                None if whole.mins is None else whole.mins[:, groups],
                None if whole.supers is None else whole.supers[:, own.start // SUPER : own.stop // SUPER],
            )

        return replace(self, layout=layout, inputs=len(own), read=read)

    def dense(self) -> torch.Tensor:
        """Returns float32 [rows, inputs], the weights that kernels multiply with."""
        numbers = self.read()
        scales, mins = scales_and_mins(numbers, self.layout)
        codes = numbers.codes.float() if self.layout.is_fp8 else decoded(numbers.codes, self.layout)
        dense = codes * scales.repeat_interleave(self.layout.group, 1)[:, : self.inputs]
        if mins is not None:
            dense += mins.repeat_interleave(self.layout.group, 1)[:, : self.inputs]
        if self.order is not None:
            dense = torch.empty_like(dense).index_copy_(1, self.order.long(), dense)
        return dense if self.factors is None else dense * self.factors[:, None]


Matrix = torch.Tensor | StoredMatrix
Weight = torch.Tensor | tuple[Matrix, ...]
"""The weight of a product: a matrix, or several stacked ones where some are quantised."""


def decoded(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns codes as float32 integers, less their offset."""
    if layout.is_fp4:
        return torch.tensor(FP4_HALVES, dtype=torch.float32)[codes.int()]
    return codes.float() - layout.offset


def scales_and_mins(numbers: StoredNumbers, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns scales and mins, float32 [rows, groups] each. Mins are None where there are none."""
    per_super = SUPER // layout.group if numbers.supers is not None else 0
    scales = _times_supers(numbers, numbers.scales, 0, per_super)
    if layout.scales == "exponent":
        scales = torch.exp2(numbers.scales.float() - 128)
    if numbers.mins is None:
        return scales, None
    if layout.mins in {"zero", "signed zero"}:
        return scales, -numbers.mins.float() * scales
    if layout.mins == "uint8":
        return scales, -_times_supers(numbers, numbers.mins, 1, per_super)
    return scales, numbers.mins.float()


def _times_supers(numbers: StoredNumbers, small: torch.Tensor, part: int, per_super: int) -> torch.Tensor:
    if numbers.supers is None or small.is_floating_point():
        return small.float()
    return small.float() * numbers.supers[..., part].float().repeat_interleave(per_super, dim=1)


def plain(weight: Weight) -> torch.Tensor:
    """Returns the weight, which must be plain numbers: only some products take codes."""
    assert isinstance(weight, torch.Tensor), "only packed products take codes"
    return weight


def expanded(weight: Weight, like: torch.Tensor) -> torch.Tensor:
    """Returns plain numbers. Quantised matrices are expanded to the dtype and device of `like`. Raises ConfigError for
    unreadable codes."""
    if isinstance(weight, torch.Tensor):
        return weight
    parts = [part.dense() if isinstance(part, StoredMatrix) else part for part in weight]
    return torch.cat([part.to(like.device, like.dtype) for part in parts])


def stacked(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Returns one matrix with the rows of all parts, which have one layout."""
    if len(parts) == 1:
        return parts[0]
    rows = sum(part.rows for part in parts)
    factors = None
    if any(part.factors is not None for part in parts):
        factors = torch.cat([torch.ones(part.rows) if part.factors is None else part.factors for part in parts])

    def read() -> StoredNumbers:
        each = [part.read() for part in parts]
        return StoredNumbers(*(_below(of) for of in zip(*map(_fields, each), strict=True)))

    return StoredMatrix(parts[0].layout, rows, parts[0].inputs, read, factors, parts[0].order)


def can_stack(one: Matrix, other: Matrix) -> bool:
    """Returns whether both can be stacked into one matrix: plain numbers, or codes in one layout with one order of
    inputs."""
    if not isinstance(one, StoredMatrix) or not isinstance(other, StoredMatrix):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if one.layout != other.layout or (one.order is None) != (other.order is None):
        return False
    return one.order is None or other.order is None or torch.equal(one.order, other.order)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns uint8 [rows, bytes of a row]"""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _picked(tensor: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Returns rows of a tensor of any dtype. It picks bytes, because not all dtypes can be indexed."""
    if tensor is None:
        return None
    return as_bytes(tensor).view(len(tensor), -1)[rows].view(tensor.dtype).view(len(rows), *tensor.shape[1:])


def _fields(numbers: StoredNumbers) -> tuple[torch.Tensor | None, ...]:
    return numbers.codes, numbers.scales, numbers.mins, numbers.supers


def _below(tensors: Sequence[torch.Tensor | None]) -> Any:
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat([as_bytes(tensor) for tensor in found]).view(found[0].dtype) if found else None
