"""The bytes of packed weights: how the native kernels pad matrices, as plain numbers without torch."""

from __future__ import annotations

from typing import Final

from twostroke.kernels.layout import Layout

PANEL: Final = 32
GROUP: Final = 64
"""Outputs of a panel, and inputs that share a scale where weights are int8: both as in native/linear.h."""
LARGE_PAGE_BYTES: Final = 2 << 20
ALIGNMENT: Final = 64
"""A tensor begins at a multiple of this many bytes."""
BFLOAT16_BYTES: Final = 2
FACT_BYTES: Final = 4
"""Bytes of a scale, and of the sum that makes up for shifted inputs, of one group of int8 weights."""


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def copied_bytes(count: int) -> int:
    """Returns the bytes that a tensor of `count` bytes takes in an arena."""
    return padded(count, ALIGNMENT)


def is_quantised(inputs: int, *, is_int8: bool) -> bool:
    """Returns whether a matrix with this many inputs becomes int8 where int8 weights are configured."""
    return is_int8 and inputs % GROUP == 0


def matrix_bytes(outputs: int, inputs: int, *, is_int8: bool, is_gated: bool = False) -> int:
    """Returns the bytes that one matrix takes in an arena. A gated one has `outputs` gates and as many values."""
    rows = 2 * padded(outputs, PANEL // 2) if is_gated else padded(outputs, PANEL)
    if not is_quantised(inputs, is_int8=is_int8):
        return copied_bytes(rows * padded(inputs, 2) * BFLOAT16_BYTES)
    facts = copied_bytes(rows * (inputs // GROUP) * FACT_BYTES)
    return 2 * facts + copied_bytes(rows * inputs)


def packed_rows(rows: int, *, is_gated: bool) -> int:
    """Returns the rows of a stored matrix, rounded up to whole panels."""
    return 2 * padded(rows // 2, PANEL // 2) if is_gated else padded(rows, PANEL)


def stored_bytes(rows: int, inputs: int, layout: Layout, *, is_gated: bool = False) -> int:
    """Returns the bytes that one matrix in a file's layout takes in an arena."""
    whole = packed_rows(rows, is_gated=is_gated)
    return sum(copied_bytes(whole * of_row) for of_row in layout.row_bytes(inputs))
