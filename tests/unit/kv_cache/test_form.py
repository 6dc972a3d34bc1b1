"""Bytes of pages in every form."""

from dataclasses import replace

import pytest

from twostroke.kv_cache.form import FORMS, KvForm, page_form
from twostroke.models.spec import DTYPE_BYTES
from twostroke.page_forms.page_form import PageShape

SHAPE = PageShape(layers=30, kv_heads=3, block=16, head_dim=64)


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_a_plain_form_takes_its_numbers_and_nothing_else(name: str) -> None:
    assert FORMS[name].page_bytes(SHAPE) == 30 * 2 * 3 * 16 * 64 * DTYPE_BYTES[name]


def test_eight_bit_forms_carry_a_scale_for_each_token_and_head() -> None:
    for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
        assert FORMS[name].page_bytes(SHAPE) == 30 * 2 * 3 * 16 * (64 + 4)


def test_pages_of_several_ranks_are_as_long_as_those_of_one_and_have_a_name_of_their_own() -> None:
    for name in (*FORMS, "int4+2xbfloat16"):
        form = page_form(f"{name}/3")
        assert form.name == f"{name}/3"
        assert form.page_bytes(SHAPE) == page_form(name).page_bytes(SHAPE)
        assert [part.first_head for part in form.parts(SHAPE) if part.first_layer == 0] == [0, 1, 2]


def test_ranks_that_share_heads_have_fewer_ranges_than_there_are_ranks() -> None:
    latents = replace(SHAPE, kv_heads=1, head_dim=576, latent_dim=512)
    assert len(page_form("bfloat16/4").parts(latents)) == 1
    assert KvForm("bfloat16/4") != KvForm("bfloat16"), "sums of four parts have other bits"


def test_four_bit_pages_are_a_third_of_sixteen_bit_pages() -> None:
    ratio = FORMS["bfloat16"].page_bytes(SHAPE) / FORMS["int4"].page_bytes(SHAPE)
    assert 2.85 < ratio < 2.95


def test_pages_that_may_have_been_converted_never_pass_for_pages_that_were_computed() -> None:
    forms = [KvForm("int8"), KvForm("bfloat16"), KvForm("int8", "bfloat16"), KvForm("int8", "float16")]
    assert len({str(form) for form in forms}) == len(forms)
    assert [str(form) for form in forms[:3]] == ["int8", "bfloat16", "int8 from bfloat16"]


def test_pages_become_those_of_a_worker_as_they_are_or_from_the_form_that_it_converts_and_no_other() -> None:
    computed, original, converted = KvForm("int8"), KvForm("bfloat16"), KvForm("int8", "bfloat16")
    taken = {(one, other) for one in (computed, original, converted) for other in (computed, original, converted)}
    taken = {pair for pair in taken if pair[0].takes(pair[1])}
    assert taken == {(computed, computed), (original, original), (converted, converted), (converted, original)}
