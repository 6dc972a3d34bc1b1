"""How files store the numbers of quantised matrices: codes of some bits, and scales of groups of inputs. No torch here.

A weight is (code - offset) * scale + min. Two-level scales are small integers times a float16 that 256 inputs share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

SUPER: Final = 256
"""Inputs that share the float16 of two-level scales, as in the K formats of GGUF."""

NUMBER_BYTES: Final = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "exponent": 1,
    "uint8": 1,
    "int8": 1,
    "zero": 1,
    "signed zero": 1,
    "none": 0,
}
"""Bytes of one scale or min of each kind."""

SCALES: Final = ("float16", "bfloat16", "float32", "exponent", "uint8", "int8")
"""Kinds of scales, in the order of `Scales` in native/linear.h: numbers, powers of two (E8M0), and the two-level ones.
"""
MINS: Final = ("none", "float16", "zero", "uint8", "bfloat16", "signed zero")
"""Kinds of mins, in the order of `Mins` in native/linear.h. "zero" and "signed zero" are the code that stands for 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to store a matrix whose rows are outputs."""

    bits: int
    """Bits of a code: 4, 5, 6 or 8."""
    group: int
    """Number of inputs that share a scale."""
    scales: str
    mins: str = "none"
    offset: int = 0
    """Number that is subtracted from every code. Codes of 8 bits are signed and have none."""
    is_fp4: bool = False
    """Whether codes stand for numbers of FP4 (E2M1), counted in halves."""
    is_fp8: bool = False
    """Whether codes are numbers of FP8 (E4M3)."""

    def __post_init__(self) -> None:
        assert self.scales in SCALES, "a kind that the kernels know"
        assert self.mins in MINS, "a kind that the kernels know"

    @property
    def unit(self) -> int:
        """Number of inputs over which the native kernels add up integer products before they scale the sum."""
        return 16 if self.bits == 6 else 32

    @property
    def super_parts(self) -> int:
        """Number of float16 values for 256 inputs of a row: one for the scales, and one for the mins if these have two
        levels, too."""
        return (self.scales in {"uint8", "int8"}) + (self.mins == "uint8")

    @property
    def whole_inputs(self) -> int:
        """Returns how many neighbouring inputs must stay together."""
        return SUPER if self.super_parts else self.unit

    def can_pack(self, inputs: int) -> bool:
        """Returns whether the kernels can multiply a matrix with this many inputs in this layout."""
        return inputs % self.whole_inputs == 0 and self.group % self.unit == 0

    def of_inputs(self, own: range, inputs: int) -> Layout | None:
        """Returns the layout of a part of a matrix with this many inputs; None if the part ends between inputs that
        must stay together.

        A part that ends within a group gets smaller groups. Each has the scale of the group that it comes from.
        """
        if own.start % self.whole_inputs or own.stop % self.whole_inputs:
            return None
        if own.start // self.group == (own.stop - 1) // self.group:
            return replace(self, group=min(self.group, len(own)))
        ends_whole = own.stop % self.group == 0 or own.stop == inputs
        if own.start % self.group == 0 and ends_whole:
            return self
        return replace(self, group=math.gcd(self.group, own.start, own.stop))

    def groups(self, inputs: int) -> int:
        """Returns how many scales a row has; the last group may be shorter."""
        return -(-inputs // self.group)

    def row_bytes(self, inputs: int) -> tuple[int, ...]:
        """Returns the bytes of a row's codes, scales, mins and float16 of 256 inputs."""
        groups = self.groups(inputs)
        return (
            inputs * self.bits // 8,
            groups * NUMBER_BYTES[self.scales],
            groups * NUMBER_BYTES[self.mins],
            inputs // SUPER * self.super_parts * 2,
        )


DEVICE_TILE: Final = 64
"""Outputs, and inputs, of a tile of codes on a device. The tensor cores of four warps multiply as many outputs."""

EXPANDED_BYTES: Final = 64 << 20
"""Most bytes of plain numbers into which a device expands a quantised matrix for one product with many rows."""

DEVICE_SCALES: Final = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "exponent": "bfloat16",
    "uint8": "float32",
    "int8": "float32",
}
"""The dtype of each kind of scales on a device. It holds all of them exactly; two-level scales are multiplied out."""

DEVICE_MINS: Final = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "zero": "float32",
    "signed zero": "float32",
    "uint8": "float32",
}
"""The dtype of each kind of mins on a device. Where the file has codes of zero, they are multiplied by the scale."""


def device_bits(layout: Layout) -> int:
    """Returns the bits of a code on a device: codes of 5 and 6 bits are widened."""
    return 4 if layout.bits == 4 else 8


def device_matrix_bytes(layout: Layout, rows: int, inputs: int) -> int:
    """Returns the bytes of a quantised matrix on a device: codes, scales and mins. Factors of rows, which widen few of
    them, are not counted."""
    of_group = NUMBER_BYTES[DEVICE_SCALES[layout.scales]]
    if layout.mins != "none":
        of_group += NUMBER_BYTES[DEVICE_MINS[layout.mins]]
    tiles = -(-rows // DEVICE_TILE) * -(-inputs // DEVICE_TILE)
    return tiles * DEVICE_TILE * DEVICE_TILE * device_bits(layout) // 8 + rows * layout.groups(inputs) * of_group
