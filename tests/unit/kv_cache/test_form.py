"""Bytes of pages in every form."""

import pytest

from twostroke.kv_cache.form import FORMS, PageShape
from twostroke.models.spec import DTYPE_BYTES

SHAPE = PageShape(layers=30, kv_heads=3, block=16, head_dim=64)


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_a_plain_form_takes_its_numbers_and_nothing_else(name: str) -> None:
    assert FORMS[name].page_bytes(SHAPE) == 30 * 2 * 3 * 16 * 64 * DTYPE_BYTES[name]


def test_eight_bit_forms_carry_a_scale_for_each_token_and_head() -> None:
    for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
        assert FORMS[name].page_bytes(SHAPE) == 30 * 2 * 3 * 16 * (64 + 4)


def test_four_bit_pages_are_a_third_of_sixteen_bit_pages() -> None:
    ratio = FORMS["bfloat16"].page_bytes(SHAPE) / FORMS["int4"].page_bytes(SHAPE)
    assert 2.85 < ratio < 2.95
