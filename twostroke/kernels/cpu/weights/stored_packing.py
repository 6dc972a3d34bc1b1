"""Packs quantised matrices of a file in the order in which native/stored.h reads them: panels of 32 outputs, unit after
unit."""

from __future__ import annotations

import functools

import torch

from twostroke.kernels.cpu.weights.arena import Arena
from twostroke.kernels.cpu.weights.packing import PANEL, packed_rows
from twostroke.kernels.layout import Layout
from twostroke.kernels.products.stored import StoredMatrix, StoredNumbers, as_bytes


class PackedMatrix:
    """The tensors of one matrix, placed in an arena. They have whole panels: rows of zeros follow the last output."""

    def __init__(self, matrix: StoredMatrix, arena: Arena, *, is_gated: bool) -> None:
        """In a gated product, half panels of gates and half panels of values take turns."""
        layout, inputs = matrix.layout, matrix.inputs
        rows = packed_rows(matrix.rows, is_gated=is_gated)
        numbers = functools.cache(lambda: _ordered(matrix.read(), is_gated=is_gated))
        sizes = layout.row_bytes(inputs)
        panels = rows // PANEL

        def place(bytes_of_row: int, make: str) -> torch.Tensor | None:
            if not bytes_of_row:
                return None
            return arena.place((panels, bytes_of_row * PANEL), lambda: _panels(numbers(), layout, make))

        codes = place(sizes[0], "codes")
        assert codes is not None, "every layout has codes"
        self.codes = codes
        self.scales = place(sizes[1], "scales")
        self.mins = place(sizes[2], "mins")
        self.supers = place(sizes[3], "supers")
        numbers.cache_clear()


def ordered(rows: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """Returns rows [rows, ..] in the order of packed ones, padded with rows of zeros."""
    whole = packed_rows(len(rows), is_gated=is_gated)
    wide = rows.new_zeros(whole, *rows.shape[1:])
    if not is_gated:
        wide[: len(rows)] = rows
        return wide
    outputs, half = len(rows) // 2, PANEL // 2
    both = wide.view(2, whole // 2, *rows.shape[1:])
    both[:, :outputs] = rows.view(2, outputs, *rows.shape[1:])
    return both.view(2, whole // PANEL, half, *rows.shape[1:]).transpose(0, 1).reshape(whole, *rows.shape[1:])


def _ordered(numbers: StoredNumbers, *, is_gated: bool) -> StoredNumbers:
    def order(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return ordered(as_bytes(tensor), is_gated=is_gated).view(tensor.dtype)

    codes, scales = order(numbers.codes), order(numbers.scales)
    assert codes is not None, "no matrix lacks them"
    assert scales is not None, "no matrix lacks them"
    return StoredNumbers(codes, scales, order(numbers.mins), order(numbers.supers))


def _panels(numbers: StoredNumbers, layout: Layout, which: str) -> torch.Tensor:
    """Returns uint8 [panels, bytes] of one tensor: for each input or group, the numbers of all outputs of a panel."""
    if which == "codes":
        facts = words_of(numbers.codes.view(torch.uint8), layout)
    else:
        found = getattr(numbers, which)
        facts = found.reshape(len(found), -1)
    panels = facts.view(len(facts) // PANEL, PANEL, -1).transpose(1, 2).contiguous()
    return panels.view(len(panels), -1).view(torch.uint8)


def words_of(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns int32 [rows, words] of uint8 codes [rows, inputs], unit after unit as in native/stored.h."""
    if layout.bits == 8:
        return codes.contiguous().view(torch.int32)
    rows, units, steps = len(codes), codes.shape[1] // layout.unit, layout.unit // 4
    fours = codes.view(rows, units, steps, 4)
    low = fours & 15
    words = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
    if layout.bits > 4:
        width = layout.bits - 4
        upper = torch.zeros(rows, units, 1, 4, dtype=torch.uint8)
        for step in range(steps):
            upper[:, :, 0] |= (fours[:, :, step] >> 4) << step * width
        words.append(upper)
    return torch.cat(words, dim=2).view(rows, -1).view(torch.int32)
