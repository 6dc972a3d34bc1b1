"""A converted page has the bits that the other form's kernels write for the numbers that the page stores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import pairwise
from tests.unit.kernels.cpu.test_attention import in_pieces
from tests.unit.kernels.page_forms.test_page_forms import LAYER, SLACK, VARIANTS, Prompts
from tests.unit.kernels.variants import LATER_OF_PARTS
from twostroke.config.cache import KV_FORMATS
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kernels.pools.page_pool import PLAIN, PagePool
from twostroke.kv_cache.form import FORMS, Conversion, JointForm, KvForm, page_form
from twostroke.page_forms.page_form import PageShape

BY_TOKEN = [form for form in KV_FORMATS if not FORMS[form].spans_block]
PAIRS = [pair for pair in itertools.product(BY_TOKEN, BY_TOKEN) if pair[0] != pair[1]]
shapes = st.builds(
    PageShape,
    layers=st.sampled_from([2, 30]),
    kv_heads=st.integers(1, 3),
    block=st.sampled_from([4, 16, 32]),
    head_dim=st.sampled_from([8, 20, 64, 128]),
)


def pool_of(
    pages: int, form: str, shape: PageShape, key_centers: torch.Tensor | None = None
) -> tuple[torch.Tensor, PagePool]:
    data = torch.zeros(pages, FORMS[form].page_bytes(shape), dtype=torch.uint8)
    return data, PagePool.over(data, FORMS[form], shape, key_centers)


def converted(
    data: torch.Tensor,
    source: str,
    target: str,
    shape: PageShape,
    *,
    has_pieces: bool,
    key_centers: torch.Tensor | None = None,
) -> torch.Tensor:
    centers = None if key_centers is None else key_centers.numpy()
    conversion = Conversion(KvForm(source), KvForm(target, source), shape, has_pieces, centers)
    out = torch.full((len(data), conversion.page_bytes), 0xAB, dtype=torch.uint8)
    for page, into in zip(data, out, strict=True):
        convert_page(conversion, page, into)
    return out


def normal(tokens: int, shape: PageShape, seed: int) -> torch.Tensor:
    """Keys or values, some of which are large, small or zero."""
    rows = torch.randn(tokens, shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(seed))
    rows[1::7] *= 50
    rows[2::7] *= 1e-3
    rows[3::11] = 0
    return rows


@pytest.mark.parametrize(("source", "target"), PAIRS)
@settings(max_examples=6, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), is_centered=st.booleans())
def test_a_page_becomes_what_the_reference_writes_of_the_keys_and_values_in_it(
    source: str, target: str, shape: PageShape, seed: int, is_centered: bool
) -> None:
    centers = Prompts(shape, 1, (1,), torch.float32, seed, is_centered).key_centers
    data, pool = pool_of(2, source, shape, centers)
    expected, right = pool_of(2, target, shape, centers)
    slots = torch.arange(2 * shape.block)
    for layer in range(shape.layers):
        pool.write(*(normal(len(slots), shape, seed + 100 * layer + part) for part in (0, 1)), layer, slots)
        stored = pool.read(torch.arange(2), layer)
        if pool.key_centers is not None:
            stored[:, 0] += pool.key_centers[layer, :, None]
        k, v = (stored[:, part].transpose(1, 2).flatten(0, 1) for part in (0, 1))
        right.write(k, v, layer, slots)
    assert torch.equal(converted(data, source, target, shape, has_pieces=False, key_centers=centers), expected)


@pairwise(
    later=LATER_OF_PARTS,
    path=VARIANTS,
    forms=[pair for pair in PAIRS if pair[0] in PLAIN],
    block=[4, 16, 32],
    is_centered=[False, True],
)
def test_a_page_of_native_kernels_becomes_what_they_write_in_the_other_form(
    built_parts: Mapping[str, Kernels], path: str, forms: tuple[str, str], block: int, is_centered: bool
) -> None:
    """The same keys and values go into both pools; the plain form is the model's dtype, so that none is rounded."""
    (source, target), shape = forms, PageShape(2, 3, block, 64)
    dtype = PLAIN[source]
    assert dtype in SLACK
    prompts = Prompts(shape, 3, (2 * block,), dtype, is_centered=is_centered)
    centers, data = prompts.key_centers, []
    for form in (source, target):
        pages, pool = pool_of(prompts.blocks, form, shape, centers)
        prompts.run(NativeAttention(pool, 3, prompts.scale, built_parts[path], None, dtype), prompts.whole())
        data.append(pages)
    ours = converted(data[0], source, target, shape, has_pieces=block % 16 == 0, key_centers=centers)
    layer_bytes = ours.shape[1] // shape.layers
    assert torch.equal(ours[:, LAYER * layer_bytes :], data[1][:, LAYER * layer_bytes :])
    assert data[1][:, LAYER * layer_bytes :].any()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("dim", [8, 64])
def test_the_order_of_native_kernels_is_undone_and_done_as_they_have_it(source: str, target: str, dim: int) -> None:
    shape = PageShape(3, 2, 32, dim)
    plain, pieces = pool_of(2, source, shape), pool_of(2, source, shape)
    for layer in range(shape.layers):
        plain[1].write(*(normal(64, shape, layer + part) for part in (0, 10)), layer, torch.arange(64))
    pieces[1].numbers.copy_(in_pieces(plain[1].numbers))
    if plain[1].scales is not None and pieces[1].scales is not None:
        pieces[1].scales.copy_(plain[1].scales)
    rows = converted(plain[0], source, target, shape, has_pieces=False)
    ordered = converted(pieces[0], source, target, shape, has_pieces=True)
    views = [PagePool.over(each, FORMS[target], shape) for each in (rows, ordered)]
    assert torch.equal(in_pieces(views[0].numbers), views[1].numbers)
    if views[0].scales is not None and views[1].scales is not None:
        assert torch.equal(views[0].scales, views[1].scales)


@pytest.mark.parametrize("form", [*KV_FORMATS, "int4+1xbfloat16"])
@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (4, 2), (2, 4), (2, 3), (8, 1)])
def test_heads_of_a_page_are_put_in_other_ranges_as_they_lie(form: str, source: int, target: int) -> None:
    shape = PageShape(layers=4, kv_heads=12 if 3 in {source, target} else 4, block=16, head_dim=32)
    noise = torch.Generator().manual_seed(source)
    page = torch.randint(0, 256, (page_form(form).page_bytes(shape),), dtype=torch.uint8, generator=noise)
    one, other = (form if ranks == 1 else f"{form}/{ranks}" for ranks in (source, target))
    (moved,) = converted(page[None], one, other, shape, has_pieces=False)
    assert by_head(moved, other, shape) == by_head(page, one, shape)
    (back,) = converted(moved[None], other, one, shape, has_pieces=False)
    assert torch.equal(back, page)


def by_head(page: torch.Tensor, name: str, shape: PageShape) -> dict[tuple[int, int], bytes]:
    """The bytes that a page stores of a head in a layer, found without the code that converts."""
    form = page_form(name)
    ranges = form.ranges(shape.kv_heads) if isinstance(form, JointForm) else 1
    inner, heads = (form.inner if isinstance(form, JointForm) else form), shape.kv_heads // ranges
    found: dict[tuple[int, int], bytes] = {}
    for at, data in enumerate(page.chunk(ranges)):
        for part in inner.parts(replace(shape, kv_heads=heads)):
            for layer, head in itertools.product(range(part.shape.layers), range(heads)):
                own = data[part.bytes].view(part.shape.layers, -1)[layer]
                is_plain = part.form.name in PLAIN
                pieces = own.view(2, heads, -1)[:, head] if is_plain else own.view(heads, -1)[head]
                found[part.first_layer + layer, at * heads + head] = pieces.contiguous().numpy().tobytes()
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [("bfloat16", "fp8_e4m3"), ("float32", "bfloat16"), ("int4", "int8"), ("bfloat16", "int4+1xfloat32")],
)
@pytest.mark.parametrize("ranks", [(2, 2), (4, 2), (2, 4), (1, 2), (4, 1)])
def test_ranges_and_numbers_of_native_kernels_change_at_once(one: str, other: str, ranks: tuple[int, int]) -> None:
    shape = PageShape(layers=4, kv_heads=4, block=16, head_dim=32)
    centers = Prompts(shape, 4, (1,), torch.float32, is_centered=True).key_centers

    def become(data: torch.Tensor, source: str, target: str) -> torch.Tensor:
        return converted(data, source, target, shape, has_pieces=True, key_centers=centers)

    pages = torch.randn(2, 2 * shape.layers * shape.kv_heads * shape.block * shape.head_dim).bfloat16()
    data = pages.view(torch.uint8) if one == "bfloat16" else become(pages.view(torch.uint8), "bfloat16", one)
    forms = zip((one, other), ranks, strict=True)
    source, target = (name if count == 1 else f"{name}/{count}" for name, count in forms)
    ranged = data if source == one else become(data, one, source)
    moved = become(ranged, source, target)
    assert torch.equal(moved if target == other else become(moved, target, other), become(data, one, other))
