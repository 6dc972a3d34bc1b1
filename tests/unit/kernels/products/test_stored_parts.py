"""Parts of matrices in a file's form: ranks have neighbouring rows or inputs of them, with the same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.products.test_stored_products import WITH_PAIRS
from tests.unit.kernels.stored_matrices import FP8, LAYOUTS, rounded, stored
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import NativeLinears
from twostroke.kernels.layout import Layout

INPUTS = 768
PARTS = (range(256), range(256, 768), range(512, 768))
"""Neighbouring inputs that every layout can have alone."""
ODD_PARTS = (range(32), range(96, 160), range(160, 416), range(736, 768))
"""Those that end amid groups."""


@pytest.mark.parametrize("name", [*LAYOUTS, "FP8"])
def test_a_part_has_the_numbers_of_the_whole_and_kernels_multiply_them(name: str, kernels: Kernels) -> None:
    layout = {**LAYOUTS, "FP8": FP8}[name]
    whole, linears = stored(layout, 40, INPUTS), NativeLinears(kernels, None)
    dense, x = whole.dense(), torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(whole.picked(torch.arange(7, 29)).dense(), dense[7:29])
    for own in PARTS if layout.super_parts else (*PARTS, *ODD_PARTS):
        of_part = layout.of_inputs(own, INPUTS)
        assert of_part is not None
        part, inputs = whole.of_inputs(own, of_part), x[:, own.start : own.stop]
        assert torch.equal(part.dense(), dense[:, own.start : own.stop])
        weights = part.dense().bfloat16() if layout.is_fp8 and kernels.variant in WITH_PAIRS else part.dense()
        truth = (inputs if layout.is_fp8 else rounded(inputs, layout.unit)).double() @ weights.double().T
        torch.testing.assert_close(
            linears.linear((part,))(inputs).double(), truth, rtol=2**-8, atol=1e-5 * float(truth.std())
        )


@pytest.mark.parametrize(
    ("name", "own", "group"),
    [
        ("Q4_0", range(32, 96), 32),
        ("GPTQ", range(128, 384), 128),
        ("GPTQ", range(64, 384), 64),
        ("GPTQ", range(128, 192), 64),
        ("int8 per output", range(256, 512), 256),
        ("int8 per output", range(256, 768), 256),
        ("Q4_K", range(128, 768), None),
        ("Q4_0", range(16, 768), None),
    ],
)
def test_groups_that_a_part_cuts_become_smaller_and_blocks_of_two_levels_are_not_cut(
    name: str, own: range, group: int | None
) -> None:
    found: Layout | None = LAYOUTS[name].of_inputs(own, INPUTS)
    assert (None if found is None else found.group) == group
