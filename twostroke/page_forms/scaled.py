"""Forms that store numbers of one byte, with a scale for each token and head."""

from __future__ import annotations

from typing import Final

from twostroke.page_forms.page_form import PageForm, PageShape

SCALE_BYTES: Final = 4
"""Bytes of the float32 scale of a token's key or value in one head."""


def _scaled_per_token(name: str, largest_distance: float, text: str) -> PageForm:
    def both(shape: PageShape) -> int:
        return shape.block * (shape.head_dim + SCALE_BYTES)

    return PageForm(name, both, both, text, "twostroke.kernels.page_forms.by_token", largest_distance)


FP8_E4M3 = _scaled_per_token("fp8_e4m3", 0.3, "8-bit floats with 3 digits, one scale per token and head")
FP8_E5M2 = _scaled_per_token("fp8_e5m2", 0.5, "8-bit floats with 2 digits, one scale per token and head")
INT8 = _scaled_per_token("int8", 0.2, "8-bit integers, one scale per token and head")
