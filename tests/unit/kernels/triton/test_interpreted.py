"""Every Triton kernel against its torch twin in the interpreter, over random shapes, pages and ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.base.errors import ConfigError
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.spans import Spans, TokenSlots, cut_into_tiles, span_fields
from twostroke.kernels.pools.page_pool import BYTES, PLAIN, PagePool
from twostroke.kernels.triton.attention import LEAST_SHARED_BYTES, TritonAttention
from twostroke.kernels.triton.decode import DecodeTuning, decode_attention, decode_tuning, plan_decode
from twostroke.kernels.triton.prefill import PrefillTuning, prefill_tuning
from twostroke.kv_cache.form import FORMS
from twostroke.page_forms.page_form import PageShape

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
CPU = torch.device("cpu")
NAN = float("nan")
SMALL_DECODE = DecodeTuning(keys=32, warps=4, stages=2, least_share=32)
SMALL_PREFILL = PrefillTuning(rows=16, keys=32, warps=4, stages=2)

shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 2),
        "groups": st.sampled_from([1, 3, 4]),
        "head_dim": st.sampled_from([64, 80, 96, 128, 256]),
        "block": st.sampled_from([16, 32, 128]),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "spans": st.lists(
            st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(2, 40))), min_size=1, max_size=3
        ),
        "seed": st.integers(0, 1000),
    }
)
"""`spans`: per sequence (tokens already in pages, new tokens)."""


class Case:
    """A pool with random content whose unowned pages are NaN, and a batch whose sequences own scattered pages."""

    def __init__(self, shape: dict) -> None:  # type: ignore[type-arg]  # a hypothesis draw
        self.random = torch.Generator().manual_seed(shape["seed"])
        self.dim, self.dtype, self.kv_heads = shape["head_dim"], shape["dtype"], shape["kv_heads"]
        self.heads = self.kv_heads * shape["groups"]
        self.scale = self.dim**-0.5
        block, spans = shape["block"], shape["spans"]
        blocks = [-(-(past + new) // block) for past, new in spans]
        self.pool = self.normal(sum(blocks) + 2, 2, 2, self.kv_heads, block, self.dim)
        pages = (torch.randperm(len(self.pool), generator=self.random, dtype=torch.int32)).tolist()
        self.tables = torch.zeros(len(spans), max(blocks) + 1, dtype=torch.int32)
        for row, count in enumerate(blocks):
            self.tables[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
        self.pool[torch.tensor(pages)] = NAN
        at = [torch.arange(past, past + new, dtype=torch.int32) for past, new in spans]
        self.slots = torch.cat([self.tables[row, x // block].long() * block + x % block for row, x in enumerate(at)])
        self.positions = torch.cat(at)
        for (past, new), row in zip(spans, self.tables, strict=True):  # nobody has written past a context
            end = past + new
            if end % block:
                self.pool[row[end // block].long(), ..., end % block :, :] = NAN
        self.starts = [0]
        for _, new in spans:
            self.starts.append(self.starts[-1] + new)
        self.contexts = [past + new for past, new in spans]
        angles = self.positions[:, None].float() * torch.linspace(1, 0.01, self.dim // 2)
        self.placement = TokenSlots(self.slots, angles.cos(), angles.sin())

    @property
    def batch(self) -> RaggedBatch:
        return RaggedBatch(
            positions=self.positions,
            query_starts=tuple(self.starts),
            context_lens=tuple(self.contexts),
            block_tables=self.tables,
            write_slots=self.slots,
            cosines=self.placement.cosines,
            sines=self.placement.sines,
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three views of one fused row, as the model has them."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = torch.split(self.normal(len(self.positions), sum(heads), self.dim), heads, dim=1)
        return q, k, v

    def close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=actual is self.pool)


def case_of(*spans: tuple[int, int], groups: int = 2, dtype: torch.dtype = torch.float32) -> Case:
    return Case(
        {"kv_heads": 2, "groups": groups, "head_dim": 64, "block": 16, "dtype": dtype, "spans": spans, "seed": 5}
    )


def check_step(case: Case, backend: TritonAttention) -> None:
    """One layer of a step through `backend`, whose pool is its own copy."""
    layer, expected_pool = 1, case.pool.clone()
    q, k, v = case.qkv()
    rotated = reference.rotate_and_store(q, k, v, PagePool.plain(expected_pool), layer, case.placement)
    expected = reference.paged_attention(rotated, PagePool.plain(expected_pool), layer, case.batch, case.scale)
    step = backend.begin(case.batch)
    actual_q = step.store(layer, q, k, v)
    actual = step.attend(layer, actual_q).view_as(expected)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(actual_q, rotated, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(backend.pool.numbers, expected_pool, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=3, deadline=None)
@given(shape=shapes)
def test_a_step_equals_the_reference(shape: dict) -> None:  # type: ignore[type-arg]
    case = Case(shape)
    check_step(
        case,
        TritonAttention(
            PagePool.plain(case.pool.clone()), case.heads, case.scale, decode=SMALL_DECODE, prefill=SMALL_PREFILL
        ),
    )


@pytest.mark.parametrize(
    "dtype", [pytest.param(each, marks=() if each == torch.bfloat16 else pytest.mark.slow) for each in TOLERANCE]
)
def test_a_mixed_step_equals_the_reference_with_the_tiles_of_a_real_device(dtype: torch.dtype) -> None:
    case = case_of((140, 1), (0, 70), (40, 9), (17, 1), dtype=dtype)
    check_step(case, TritonAttention(PagePool.plain(case.pool.clone()), case.heads, case.scale))


@pytest.mark.parametrize(
    ("form", "is_centered"),
    [
        *((form, False) for form in PLAIN),
        *((form, True) for form in BYTES),
        *(pytest.param(form, False, marks=pytest.mark.slow) for form in BYTES),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_mixed_step_over_pages_of_every_form_equals_the_reference(
    dtype: torch.dtype, form: str, is_centered: bool
) -> None:
    """Every byte of the pages is stale at first; keys are not rotated, so that all scales and numbers are the same."""
    case = case_of((0, 21), (0, 9), (0, 1), dtype=dtype)
    placement = TokenSlots(case.slots, torch.ones_like(case.placement.cosines), torch.zeros_like(case.placement.sines))
    case.placement = placement
    shape, centers = PageShape(2, case.kv_heads, 16, case.dim), None
    if is_centered:
        centers = case.normal(2, case.kv_heads, case.dim).float() * 5
    ours, right = (
        PagePool.over(
            torch.full((len(case.pool), FORMS[form].page_bytes(shape)), 0xFF, dtype=torch.uint8),
            FORMS[form],
            shape,
            centers,
        )
        for _ in range(2)
    )
    backend = TritonAttention(ours, case.heads, case.scale, dtype, decode=SMALL_DECODE, prefill=SMALL_PREFILL)
    backend.multiprocessors = 4
    q, k, v = case.qkv()
    k[3], v[4], v[5], k[6] = 0.0, 0.0, v[5] * 1e-20, k[6] * 40
    rotated = reference.rotate_and_store(q, k, v, right, 1, placement)
    step = backend.begin(case.batch)
    actual = step.attend(1, step.store(1, q, k, v)).view_as(q)
    expected = reference.paged_attention(rotated, ours, 1, case.batch, case.scale)
    if ours.scales is None or right.scales is None:  # the interpreter cuts float32 off where devices round it
        torch.testing.assert_close(ours.numbers, right.numbers, rtol=1e-2, atol=1e-2, equal_nan=True)
    else:
        assert torch.equal(ours.numbers, right.numbers)
        assert torch.equal(ours.scales.view(torch.int32), right.scales.view(torch.int32))
    slack = TOLERANCE[torch.bfloat16] if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(actual, expected, rtol=slack, atol=slack)


@settings(max_examples=3, deadline=None)
@given(shape=shapes, multiprocessors=st.integers(1, 20))
def test_splitting_a_context_changes_nothing(shape: dict, multiprocessors: int) -> None:  # type: ignore[type-arg]
    shape = shape | {"spans": [(past, min(new, 3)) for past, new in shape["spans"]]}
    case = Case(shape)
    spans = Spans(
        fields=span_fields(
            [
                (row, case.starts[row], case.starts[row + 1] - case.starts[row], context)
                for row, context in enumerate(case.contexts)
            ],
            CPU,
        ),
        block_tables=case.tables,
        most_rows=3,
        longest_context=case.tables.shape[1] * case.pool.shape[4],
    )
    q = case.normal(len(case.positions) + 1, case.heads, case.dim)
    expected, actual = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    plan = plan_decode(spans, PagePool.plain(case.pool), case.heads, multiprocessors, SMALL_DECODE)
    plan.partials.fill_(NAN), plan.weights.fill_(NAN)
    decode_attention(q, PagePool.plain(case.pool), 0, spans, case.scale, actual, plan)
    reference.span_attention(q, PagePool.plain(case.pool), 0, spans, case.scale, expected)
    case.close(actual, expected)


def test_one_plan_serves_whatever_lengths_the_device_tensors_hold() -> None:
    """What replaying a captured step does: same grid, same addresses, other lengths, tables and slots."""
    backend, step, fields, tables = (
        None,
        None,
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(2, 8, dtype=torch.int32),
    )
    slots, cosines, sines = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 32), torch.zeros(2, 32)
    pool = case_of((60, 1), (3, 1)).pool
    room = torch.zeros(64, *pool.shape[1:])
    backend = TritonAttention(PagePool.plain(room), 4, 0.125, decode=SMALL_DECODE)
    backend.multiprocessors = 4
    step = backend.begin_decode(Spans(fields, tables, 1, 128), TokenSlots(slots, cosines, sines))
    for spans in ([(60, 1), (3, 1)], [(0, 1), (100, 1)], [(15, 1), (16, 1)]):
        case = case_of(*spans)
        room[: len(case.pool)] = case.pool
        fields.copy_(torch.tensor([(row, row, 1, context) for row, context in enumerate(case.contexts)]))
        tables[:, : case.tables.shape[1]] = case.tables
        slots.copy_(case.slots), cosines.copy_(case.placement.cosines), sines.copy_(case.placement.sines)
        q, k, v = case.qkv()
        actual = step.attend(1, step.store(1, q, k, v))
        rotated = reference.rotate_and_store(q, k, v, PagePool.plain(case.pool), 1, case.placement)
        expected = reference.paged_attention(rotated, PagePool.plain(case.pool), 1, case.batch, case.scale)
        case.close(actual, expected.flatten(1))


def test_a_span_that_pads_the_batch_gets_zeros() -> None:
    case = case_of((20, 1))
    fields = torch.tensor([[0, 0, 1, 21], [0, 1, 1, 0]], dtype=torch.int32)
    backend = TritonAttention(PagePool.plain(case.pool), case.heads, case.scale, decode=SMALL_DECODE)
    backend.multiprocessors = 4
    step = backend.begin_decode(
        Spans(fields, case.tables, 1, 32), TokenSlots(torch.zeros(2).long(), torch.zeros(2, 32), torch.zeros(2, 32))
    )
    out = step.attend(0, case.normal(2, case.heads, case.dim))
    assert out[0].abs().min() > 0
    assert not out[1].any()


def test_tiles_cover_every_row_once_and_start_with_the_longest_context() -> None:
    tiles = cut_into_tiles([(0, 0, 20, 50), (1, 20, 5, 5), (2, 25, 33, 133)], 16)
    covered = sorted(row for _, first, rows, _ in tiles for row in range(first, first + rows))
    assert covered == list(range(58))
    assert [context for *_, context in tiles] == [133, 132, 116, 50, 46, 5]
    assert (2, 25, 16, 116) in tiles


def test_a_device_with_less_shared_memory_gets_smaller_tiles() -> None:
    for dim in (64, 128, 256):
        small = prefill_tuning(dim, torch.bfloat16, LEAST_SHARED_BYTES)
        assert small.rows < prefill_tuning(dim, torch.bfloat16).rows
        two_tiles = 2 * 2 * small.keys * dim * 2
        assert small.rows * dim * 2 + two_tiles <= LEAST_SHARED_BYTES
        keys = decode_tuning(dim, torch.bfloat16, LEAST_SHARED_BYTES).keys
        assert keys < decode_tuning(dim, torch.bfloat16).keys


def test_other_layers_and_pages_are_left_alone() -> None:
    case = case_of((0, 6))
    before = case.pool.clone()
    TritonAttention(PagePool.plain(case.pool), case.heads, case.scale).begin(case.batch).store(1, *case.qkv())
    changed = (case.pool.nan_to_num(9) != before.nan_to_num(9)).flatten(2).any(dim=2)
    assert not changed[:, 0].any()
    assert changed[:, 1].tolist() == [page == case.tables[0, 0] for page in range(len(changed))]


def test_warming_up_takes_every_decode_variant_through_its_launch_and_touches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[int, bool]] = []

    def noted(*arguments: Any) -> None:
        *_, spans, _, _, plan, _ = arguments
        launched.append((spans.most_rows, plan.splits > 1))
        decode_attention(*arguments)

    monkeypatch.setattr("twostroke.kernels.triton.attention.decode_attention", noted)
    case = case_of((20, 1), groups=4)
    before = case.pool.clone()
    TritonAttention(PagePool.plain(case.pool), case.heads, case.scale).warm_up()
    assert torch.equal(case.pool.nan_to_num(9), before.nan_to_num(9))
    assert sorted(launched) == [(rows, split) for rows in (1, 2, 4, 8, 16) for split in (False, True)]


def test_tensors_that_do_not_fit_are_named_before_the_launch() -> None:
    case = case_of((20, 1))
    backend = TritonAttention(PagePool.plain(case.pool), case.heads, case.scale)
    step = backend.begin(case.batch)
    q, k, v = case.qkv()
    with pytest.raises(AssertionError, match=r"head_dim of q must be the pool's 64, got 32"):
        step.store(0, q[..., :32], k, v)
    with pytest.raises(AssertionError, match=r"v must be in the queries' torch.float32"):
        step.store(0, q, k, v.half())
    with pytest.raises(AssertionError, match=r"layer 2 is not one of 2"):
        step.attend(2, q)
    with pytest.raises(AssertionError, match=r"a context of 64 does not fit 48 tokens of pages"):
        backend.begin_decode(Spans(torch.zeros(1, 4, dtype=torch.int32), case.tables, 1, 64), case.placement).attend(
            0, q
        )
    with pytest.raises(ConfigError, match=r"5 query heads cannot share 2 K/V heads"):
        TritonAttention(PagePool.plain(case.pool), 5, 1.0)
