"""Random matrices in every layout that the kernels know, and what their products are."""

from __future__ import annotations

from typing import Final

import torch

from twostroke.kernels.layout import SUPER, Layout
from twostroke.kernels.products.stored import StoredMatrix, StoredNumbers

LAYOUTS: Final = {
    "Q4_0": Layout(bits=4, group=32, scales="float16", offset=8),
    "Q4_1": Layout(bits=4, group=32, scales="float16", mins="float16"),
    "Q5_0": Layout(bits=5, group=32, scales="float16", offset=16),
    "Q8_0": Layout(bits=8, group=32, scales="float16"),
    "Q4_K": Layout(bits=4, group=32, scales="uint8", mins="uint8"),
    "Q5_K": Layout(bits=5, group=32, scales="uint8", mins="uint8"),
    "Q6_K": Layout(bits=6, group=16, scales="int8", offset=32),
    "MXFP4": Layout(bits=4, group=32, scales="exponent", is_fp4=True),
    "GPTQ": Layout(bits=4, group=128, scales="float16", mins="zero"),
    "GPTQ of 8 bits": Layout(bits=8, group=64, scales="bfloat16", mins="bfloat16"),
    "int8 per output": Layout(bits=8, group=512, scales="float32"),
}
FP8: Final = Layout(bits=8, group=128, scales="float32", is_fp8=True)

SCALE_DTYPES: Final = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "exponent": torch.uint8,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "zero": torch.uint8,
    "signed zero": torch.int8,
}


def stored(layout: Layout, rows: int, inputs: int, seed: int = 0) -> StoredMatrix:
    """Returns a matrix of random codes and scales."""
    draw = torch.Generator().manual_seed(seed)
    groups = layout.groups(inputs)

    def facts(kind: str) -> torch.Tensor:
        dtype = SCALE_DTYPES[kind]
        if dtype.is_floating_point:
            return (torch.rand(rows, groups, generator=draw) * 0.02).to(dtype)
        low, high = {"exponent": (118, 124), "int8": (-64, 64)}.get(kind, (0, 16))
        return torch.randint(low, high, (rows, groups), generator=draw).to(dtype)

    if layout.is_fp8:
        codes = (torch.randn(rows, inputs, generator=draw) * 20).to(torch.float8_e4m3fn)
    elif layout.bits == 8:
        codes = torch.randint(-128, 128, (rows, inputs), generator=draw).to(torch.int8)
    else:
        codes = torch.randint(0, 1 << layout.bits, (rows, inputs), generator=draw).to(torch.uint8)
    supers = (torch.rand(rows, inputs // SUPER, layout.super_parts, generator=draw) * 1e-3).half()
    numbers = StoredNumbers(
        codes,
        facts(layout.scales),
        None if layout.mins == "none" else facts(layout.mins),
        supers if layout.super_parts else None,
    )
    return StoredMatrix(layout, rows, inputs, lambda: numbers)


def rounded(x: torch.Tensor, unit: int) -> torch.Tensor:
    """float64 inputs as the kernels round them: int8 with a scale for each unit."""
    units = x.float().unflatten(1, (-1, unit))
    scales = units.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
    return ((units * inverse).round().double() * scales.double()).flatten(1)
