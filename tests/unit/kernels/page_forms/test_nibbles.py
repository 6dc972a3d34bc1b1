"""Pages of 4-bit numbers: native kernels and torch write the same bits, and attend as the words of the form say.

That no chunk, neighbour or stale byte changes a bit is checked with all other forms in test_page_forms.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.page_forms.test_page_forms import LAYER, SLACK, TORCH, VARIANTS, Prompts, backend_of
from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.page_forms.nibble_pool import NibblePool, packed, unpacked
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kv_cache.form import FORMS, Conversion, KvForm
from twostroke.page_forms.int4 import BLOCK, check_shape
from twostroke.page_forms.page_form import PageShape

PATHS = [*VARIANTS, TORCH]


def stored_rows(prompts: Prompts, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [tokens, kv_heads, D] of a sequence as full blocks store them; what is left over is exact."""
    _, k, v = prompts.rows(sequence)
    full = len(k) // BLOCK * BLOCK
    rows = torch.stack((k, v))[:, :full].float().unflatten(1, (-1, BLOCK)).permute(1, 3, 0, 2, 4)
    read = unpacked(packed(rows), k.shape[-1]).permute(2, 0, 3, 1, 4).flatten(1, 2)
    return torch.cat((read[0], k[full:].float())), torch.cat((read[1], v[full:].float()))


def expected_rows(prompts: Prompts, sequence: int, reads: torch.dtype) -> torch.Tensor:
    """Row by row: the row's own block exact, those before it as stored and as `reads` rounds them."""
    q, k, v = (each.double() for each in prompts.rows(sequence))
    stored = [each.to(reads).double() for each in stored_rows(prompts, sequence)]
    groups, outputs = prompts.heads // prompts.shape.kv_heads, []
    for position in range(len(q)):
        own = position // BLOCK * BLOCK
        keys, values = (
            torch.cat((before[:own], exact[own : position + 1])).repeat_interleave(groups, dim=1)
            for before, exact in zip(stored, (k, v), strict=True)
        )
        weights = (torch.einsum("hd,chd->hc", q[position], keys) * prompts.scale).softmax(-1)
        outputs.append(torch.einsum("hc,chd->hd", weights, values).flatten())
    return torch.stack(outputs)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=6, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 64, 80, 128, 256]),
    groups=st.integers(1, 9),
    dtype=st.sampled_from(list(SLACK)),
    lengths=st.lists(st.integers(1, 60) | st.integers(1, 600), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 99),
)
def test_blocks_hold_what_torch_packs_and_rows_see_their_own_block_exact(
    built_parts: Mapping[str, Kernels],
    path: str,
    kv_heads: int,
    head_dim: int,
    groups: int,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    seed: int,
) -> None:
    prompts = Prompts(PageShape(2, kv_heads, BLOCK, head_dim), kv_heads * groups, lengths, dtype, seed)
    data = prompts.data("int4")
    pool = NibblePool.over(data, prompts.shape, dtype)
    actual = prompts.run(backend_of(prompts, pool, path, built_parts), prompts.whole()).split(lengths)
    tables = prompts.batch(prompts.whole()).block_tables
    for sequence, length in enumerate(lengths):
        full = length // BLOCK
        blocks = torch.stack(prompts.rows(sequence)[1:])[:, : full * BLOCK].unflatten(1, (full, BLOCK))
        right = packed(blocks.permute(1, 3, 0, 2, 4))
        assert torch.equal(pool.heads[tables[sequence, :full].long(), LAYER], right)
        expected = expected_rows(prompts, sequence, torch.float32 if path in built_parts else dtype)
        slack = SLACK[dtype]
        highest = prompts.rows(sequence)[2].abs().max().item()
        torch.testing.assert_close(actual[sequence].double(), expected, rtol=slack, atol=slack * highest / 3)


@pytest.mark.parametrize("path", VARIANTS)
@pytest.mark.parametrize("dtype", list(SLACK))
def test_a_converted_page_holds_what_native_kernels_write(
    built_parts: Mapping[str, Kernels], path: str, dtype: torch.dtype
) -> None:
    prompts = Prompts(PageShape(2, 3, BLOCK, 64), 3, (2 * BLOCK,), dtype)
    source, data = str(dtype).removeprefix("torch."), {}
    for form in (source, "int4"):
        data[form] = prompts.data(form)
        prompts.run(backend_of(prompts, prompts.over(data[form], form), path, built_parts), prompts.whole())
    conversion = Conversion(KvForm(source), KvForm("int4", source), prompts.shape, has_pieces=True)
    for page, right in zip(data[source], data["int4"], strict=True):
        ours = torch.empty_like(right)
        convert_page(conversion, page, ours)
        assert torch.equal(ours.view(2, -1)[LAYER], right.view(2, -1)[LAYER])
        back = Conversion(KvForm("int4"), KvForm("float32", "int4"), prompts.shape, has_pieces=False)
        wide = torch.empty(back.page_bytes, dtype=torch.uint8)
        convert_page(back, right, wide)
        assert torch.equal(wide.view(torch.float32).view(prompts.shape.dims), unpacked_page(right, prompts.shape))


def unpacked_page(page: torch.Tensor, shape: PageShape) -> torch.Tensor:
    return unpacked(page.view(shape.layers, shape.kv_heads, -1), shape.head_dim).transpose(1, 2)


def test_a_number_is_off_by_no_more_than_half_a_step_of_its_channel_or_group() -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(50, 2, BLOCK, 64, generator=draw) * torch.logspace(-3, 3, 50)[:, None, None, None]
    rows[:, 0, :, 7] += 100  # a channel far from zero, as keys with a bias have
    read = unpacked(packed(rows), 64)
    keys = rows[:, 0].amax(1) - rows[:, 0].amin(1)
    groups = rows[:, 1].unflatten(-1, (2, 32))
    values = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(32, -1)
    rounding = 2.0**-10 * rows.abs().amax((-2, -1))[:, :, None, None]
    steps = torch.stack((keys[:, None].expand(-1, BLOCK, -1), values), dim=1) / 15
    assert ((read - rows).abs() <= 0.51 * steps + rounding).all()


def test_channels_without_spread_and_endless_ones_come_back_finite() -> None:
    rows = torch.zeros(1, 2, BLOCK, 64)
    rows[0, 0, :, 3] = 2.5
    rows[0, 0, 4, 5] = float("inf")
    rows[0, 1, 2, 1] = -3e38
    read = unpacked(packed(rows), 64)
    assert read.isfinite().all()
    assert (read[0, 0, :, 3] == 2.5).all()
    assert (read[0, 1, 3] == 0).all()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (PageShape(1, 1, 32, 64), "--kv-format int4 needs --block-size 16, not 32"),
        (PageShape(1, 1, 16, 20), "heads of a multiple of 8 values, at most 256; this model's have 20"),
        (PageShape(1, 1, 16, 512), "heads of a multiple of 8 values, at most 256; this model's have 512"),
    ],
)
def test_blocks_and_heads_that_do_not_fit_are_refused_with_the_remedy(shape: PageShape, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_shape(shape)


def test_an_unfinished_block_keeps_its_slot_until_it_is_released() -> None:
    prompts = Prompts(PageShape(1, 1, BLOCK, 8), 1, (20, 40), torch.float32)
    exact = ExactPages.sparse(8, prompts.shape, torch.float32)
    first = exact.begin(prompts.batch([(0, 0, 10), (1, 0, 40)]))
    assert len(exact.slots) == 4
    tables = prompts.batch(prompts.whole()).block_tables
    exact.slots.release([*tables[1, :2].tolist(), *tables[1, :2].tolist()])
    assert len(exact.slots) == 2
    second = exact.begin(prompts.batch([(0, 10, 20)]))
    assert second[:6].tolist() == (first[:1] + torch.arange(10, 16)).tolist()
    assert len(exact.slots) == 3


def test_on_a_device_slots_are_few_and_the_scratch_page_takes_none_of_them() -> None:
    exact = ExactPages.fixed(2, 90, PageShape(1, 1, BLOCK, 8), torch.float32, torch.device("cpu"))
    assert len(exact.pool.numbers) == 3
    tables, rows = np.array([[4, 5], [90, 90]], np.int32), np.array([0, 0, 1, 1])
    places = exact.slots.begin(rows, tables, np.array([15, 16, 0, 17], np.int32), ())
    assert places.tolist() == [15, 16, 32, 33]
    with pytest.raises(AssertionError, match="more blocks are unfinished than there are slots"):
        exact.slots.begin(rows[:1], tables + 2, np.array([0], np.int32), ())
    assert exact.slots.begin(rows[:1], tables + 2, np.array([0], np.int32), (4,)).tolist() == [0]


def test_memory_is_taken_for_unfinished_blocks_alone() -> None:
    shape = PageShape(30, 3, BLOCK, 64)
    before = _resident_bytes()
    exact = ExactPages.sparse(200_000, shape, torch.bfloat16)
    exact.pool.numbers[0] = 1
    assert _resident_bytes() - before < 64 * FORMS["bfloat16"].page_bytes(shape)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


REPEATS = 100


@pytest.mark.parametrize("path", VARIANTS)
def test_ranks_that_store_the_same_head_read_whole_blocks_of_each_other(
    built_parts: Mapping[str, Kernels], path: str
) -> None:
    """Exact pages are each rank's own. Two ranks have the numbers of a block in the same place, at no agreed time."""
    prompts = Prompts(PageShape(2, 1, BLOCK, 128), 2, (600,), torch.bfloat16)
    data = prompts.data("int4")
    ranks = [
        backend_of(prompts, NibblePool.over(data, prompts.shape, prompts.dtype), path, built_parts) for _ in range(2)
    ]
    right = prompts.run(ranks[0], prompts.whole())

    def has_right_rows(rank: int) -> bool:
        return all(torch.equal(prompts.run(ranks[rank], prompts.whole()), right) for _ in range(REPEATS))

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(has_right_rows, range(2))] == [True, True]
