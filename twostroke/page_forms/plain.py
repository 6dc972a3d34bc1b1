"""Forms that store plain numbers, without scales: the dtypes that models compute in."""

from __future__ import annotations

from twostroke.page_forms.page_form import PageForm, PageShape


def _plain(name: str, element_bytes: int, largest_distance: float, text: str) -> PageForm:
    def both(shape: PageShape) -> int:
        return shape.block * shape.head_dim * element_bytes

    return PageForm(
        name, both, both, text, "twostroke.kernels.page_forms.by_token", largest_distance, stores_latents=True
    )


BFLOAT16 = _plain("bfloat16", 2, 0.15, "16-bit numbers with the range of float32")
FLOAT16 = _plain("float16", 2, 0.03, "16-bit numbers with more digits and less range")
FLOAT32 = _plain("float32", 4, 1e-3, "32-bit numbers")
