"""All page forms, one line each, in the order in which messages name them."""

from __future__ import annotations

from typing import Final

from twostroke.page_forms.int4 import INT4
from twostroke.page_forms.page_form import PageForm
from twostroke.page_forms.plain import BFLOAT16, FLOAT16, FLOAT32
from twostroke.page_forms.scaled import FP8_E4M3, FP8_E5M2, INT8

PAGE_FORMS: Final[tuple[PageForm, ...]] = (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8_E4M3,
    FP8_E5M2,
    INT8,
    INT4,
)
