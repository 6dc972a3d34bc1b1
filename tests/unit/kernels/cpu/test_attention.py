"""The native kernel and the torch path against the oracle, over random shapes, pages and ragged batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.variants import VARIANTS, EachVariant
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.torch_attention.gathered import TorchAttention

PIECE = 16
"""Tokens whose keys and values lie together in a page; shorter pages hold plain rows."""

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(scope="module")
def teams(built_kernels: Mapping[str, Kernels]) -> Iterator[Mapping[str, Team]]:
    """Teams of two threads, one per variant."""
    teams = EachVariant(lambda name: Team(built_kernels[name], (0, 1)))
    yield teams
    for team in teams.made.values():
        team.close()


shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "groups": st.integers(1, 9),
        "head_dim": st.sampled_from([6, 8, 16, 20, 40, 64, 80, 96, 128, 256]),
        "block": st.sampled_from([1, 4, 16, 32, 256]),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "spans": st.lists(
            st.tuples(st.integers(0, 70) | st.integers(0, 700), st.just(1) | st.integers(1, 150)),
            min_size=1,
            max_size=4,
        ),
        "seed": st.integers(0, 1000),
    }
)
"""`spans`: per sequence (tokens already in pages, new tokens)."""


class Case:
    """A pool with random content, and a batch whose sequences own scattered pages."""

    def __init__(self, shape: dict) -> None:  # type: ignore[type-arg]  # a hypothesis draw
        self.random = torch.Generator().manual_seed(shape["seed"])
        self.block, self.dim, self.dtype = shape["block"], shape["head_dim"], shape["dtype"]
        self.kv_heads, self.heads = shape["kv_heads"], shape["kv_heads"] * shape["groups"]
        self.scale = self.dim**-0.5
        spans = shape["spans"]
        blocks = [-(-(past + new) // self.block) for past, new in spans]
        self.pool = self.normal(sum(blocks) + 3, 2, 2, self.kv_heads, self.block, self.dim)
        pages = torch.randperm(len(self.pool), generator=self.random, dtype=torch.int32).tolist()
        tables = torch.zeros(len(spans), max(blocks), dtype=torch.int32)
        for row, count in enumerate(blocks):
            tables[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
        positions = [torch.arange(past, past + new, dtype=torch.int32) for past, new in spans]
        self.positions = torch.cat(positions)
        slots = [
            tables[row, at // self.block].long() * self.block + at % self.block for row, at in enumerate(positions)
        ]
        starts = [0]
        for _, new in spans:
            starts.append(starts[-1] + new)
        angles = self.positions[:, None].float() * torch.linspace(1, 0.01, self.dim // 2)
        self.batch = RaggedBatch(
            positions=self.positions,
            query_starts=tuple(starts),
            context_lens=tuple(past + new for past, new in spans),
            block_tables=tables,
            write_slots=torch.cat(slots),
            cosines=angles.cos(),
            sines=angles.sin(),
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three views of one fused row, as the model has them."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = torch.split(self.normal(len(self.positions), sum(heads), self.dim), heads, dim=1)
        return q, k, v


def in_pieces(pool: torch.Tensor) -> torch.Tensor:
    """A copy of a pool of plain rows, its pages in the order of the native kernel: page.h says it in words."""
    *outer, block, dim = pool.shape
    if block % PIECE:
        return pool.clone()
    word = 2 if pool.dtype in (torch.bfloat16, torch.uint8) else 1
    keys = pool[:, :, 0].unflatten(-1, (dim // word, word)).unflatten(-3, (-1, PIECE)).transpose(-3, -2)
    values = pool[:, :, 1].unflatten(-2, (block // word, word)).transpose(-2, -1)
    return torch.stack([part.reshape(*outer[:2], *outer[3:], block, dim) for part in (keys, values)], dim=2)


def check_against_reference(case: Case, backend: AttentionBackend, pool: torch.Tensor) -> None:
    """`pool` is what `backend` works on: a copy of the case's, in the order that the backend keeps pages in."""
    layer = 1
    q, k, v = case.qkv()
    rotated = reference.rotate(q, case.batch.cosines, case.batch.sines)
    own = PagePool.plain(case.pool)
    own.write(reference.rotate(k, case.batch.cosines, case.batch.sines), v, layer, case.batch.write_slots)
    expected = reference.paged_attention(rotated, own, layer, case.batch, case.scale)
    step = backend.begin(case.batch)
    actual_q = step.store(layer, q, k, v)
    actual = step.attend(layer, actual_q).view_as(expected)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(actual_q, rotated, rtol=tolerance, atol=tolerance)
    expected_pool = in_pieces(case.pool) if isinstance(backend, NativeAttention) else case.pool
    torch.testing.assert_close(pool, expected_pool, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=20, deadline=None)
@given(shape=shapes)
def test_the_native_kernel_equals_the_reference(
    built_kernels: Mapping[str, Kernels],
    teams: Mapping[str, Team],
    variant: str,
    threads: int,
    shape: dict,  # type: ignore[type-arg]
) -> None:
    case = Case(shape)
    pool = in_pieces(case.pool)
    team = teams[variant] if threads > 1 else None
    with nullcontext() if team is None else team.step():
        check_against_reference(
            case, NativeAttention(PagePool.plain(pool), case.heads, case.scale, built_kernels[variant], team), pool
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_is_the_same_to_the_bit_in_a_batch_and_alone_with_one_thread_and_two(
    built_kernels: Mapping[str, Kernels], teams: Mapping[str, Team], variant: str, dtype: torch.dtype
) -> None:
    spans = [(0, 150), (900, 1), (31, 20), (700, 70), (1100, 9)]
    case = Case({"kv_heads": 3, "groups": 3, "head_dim": 64, "block": 16, "dtype": dtype, "spans": spans, "seed": 11})
    q, batch, team = case.qkv()[0].contiguous(), case.batch, teams[variant]
    backend = NativeAttention(PagePool.plain(case.pool), case.heads, case.scale, built_kernels[variant], team)
    together = backend.begin(batch).attend(0, q)
    with team.step():
        assert torch.equal(backend.begin(batch).attend(0, q), together)
        for sequence in range(len(spans)):
            start, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
            for row in {start, (start + end) // 2, end - 1}:
                alone = backend.begin(row_of(batch, sequence, row)).attend(0, q[row : row + 1])
                assert torch.equal(alone[0], together[row])


def row_of(batch: RaggedBatch, sequence: int, row: int) -> RaggedBatch:
    """The batch that asks for this row only."""
    one = slice(row, row + 1)
    return replace(
        batch,
        positions=batch.positions[one],
        query_starts=(0, 1),
        context_lens=(int(batch.positions[row]) + 1,),
        block_tables=batch.block_tables[sequence : sequence + 1],
        write_slots=batch.write_slots[one],
        cosines=batch.cosines[one],
        sines=batch.sines[one],
    )


@pytest.mark.parametrize("tokens", [20, 21])
def test_what_lies_in_pages_behind_the_context_is_never_used(kernels: Kernels, tokens: int) -> None:
    case = Case(
        {
            "kv_heads": 1,
            "groups": 2,
            "head_dim": 64,
            "block": 16,
            "dtype": torch.bfloat16,
            "spans": [(tokens - 1, 1)],
            "seed": 7,
        }
    )
    pool = in_pieces(case.pool)
    backend = NativeAttention(PagePool.plain(pool), case.heads, case.scale, kernels)
    q = case.qkv()[0].contiguous()
    before = backend.begin(case.batch).attend(0, q)
    case.pool[case.batch.block_tables[0, 1].item(), :, :, :, tokens - 16 :] = float("nan")
    pool.copy_(in_pieces(case.pool))
    assert torch.equal(backend.begin(case.batch).attend(0, q), before)


@settings(max_examples=15, deadline=None)
@given(shape=shapes)
def test_the_torch_path_equals_the_reference(shape: dict) -> None:  # type: ignore[type-arg]
    case = Case(shape)
    pool = case.pool.clone()
    check_against_reference(case, TorchAttention(PagePool.plain(pool), case.heads, case.scale), pool)


def test_a_long_chunk_is_cut_into_tiles_without_changing_its_result() -> None:
    case = Case(
        {
            "kv_heads": 1,
            "groups": 2,
            "head_dim": 8,
            "block": 16,
            "dtype": torch.float32,
            "spans": [(50, 300)],
            "seed": 1,
        }
    )
    pool = case.pool.clone()
    check_against_reference(case, TorchAttention(PagePool.plain(pool), case.heads, case.scale), pool)


def test_pages_far_beyond_what_32_bits_can_count_are_reached(kernels: Kernels) -> None:
    """Memory that is not touched takes none."""
    case = Case(
        {
            "kv_heads": 2,
            "groups": 3,
            "head_dim": 64,
            "block": 16,
            "dtype": torch.bfloat16,
            "spans": [(0, 30)],
            "seed": 2,
        }
    )
    q, k, v = case.qkv()
    far = 2**32 // case.pool[0].numel()
    answers = []
    large = torch.empty(far + 4, *case.pool.shape[1:], dtype=torch.bfloat16)
    for tables, pool in (((3, 1), case.pool), ((far + 3, far + 1), large)):
        table = torch.tensor([tables], dtype=torch.int32)
        slots = table[0, case.positions // 16].long() * 16 + case.positions % 16
        batch = replace(case.batch, block_tables=table, write_slots=slots)
        step = NativeAttention(PagePool.plain(pool), case.heads, case.scale, kernels).begin(batch)
        answers.append(step.attend(1, step.store(1, q.clone(), k, v)))
    assert torch.equal(*answers)


def test_a_row_that_is_no_number_stays_alone(kernels: Kernels) -> None:
    case = Case(
        {
            "kv_heads": 1,
            "groups": 2,
            "head_dim": 64,
            "block": 16,
            "dtype": torch.bfloat16,
            "spans": [(40, 9)],
            "seed": 4,
        }
    )
    step = NativeAttention(PagePool.plain(case.pool), case.heads, case.scale, kernels).begin(case.batch)
    q = case.qkv()[0].contiguous()
    before = step.attend(0, q)
    q[4] = float("nan")
    after = step.attend(0, q)
    assert after[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(after[others], before[others])


def test_other_layers_and_pages_are_left_alone(kernels: Kernels) -> None:
    case = Case(
        {"kv_heads": 2, "groups": 1, "head_dim": 8, "block": 4, "dtype": torch.float32, "spans": [(0, 6)], "seed": 3}
    )
    before = case.pool.clone()
    NativeAttention(PagePool.plain(case.pool), case.heads, case.scale, kernels).begin(case.batch).store(1, *case.qkv())
    changed = (case.pool != before).flatten(2).any(dim=2)
    assert not changed[:, 0].any()
    written = sorted({int(slot) // 4 for slot in case.batch.write_slots})
    assert changed[:, 1].nonzero().flatten().tolist() == written


def test_scores_far_apart_neither_overflow_nor_vanish(kernels: Kernels) -> None:
    case = Case(
        {"kv_heads": 1, "groups": 1, "head_dim": 8, "block": 4, "dtype": torch.float32, "spans": [(30, 1)], "seed": 5}
    )
    case.pool *= 300
    pool = in_pieces(case.pool)
    check_against_reference(case, NativeAttention(PagePool.plain(pool), 1, case.scale, kernels), pool)


def test_float16_is_rounded_as_torch_rounds_it(kernels: Kernels) -> None:
    """v goes to its slot untouched and comes back as an average of one: every half is read and written exactly."""
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = torch.cat([halves, -halves])[: 2 * 31 * 1024].view(-1, 1, 64)
    count = len(values)
    pool = torch.zeros(count, 1, 2, 1, 1, 64, dtype=torch.float16)
    batch = RaggedBatch(
        positions=torch.zeros(count, dtype=torch.int32),
        query_starts=tuple(range(count + 1)),
        context_lens=(1,) * count,
        block_tables=torch.arange(count, dtype=torch.int32)[:, None],
        write_slots=torch.arange(count),
        cosines=torch.ones(count, 32),
        sines=torch.zeros(count, 32),
    )
    step = NativeAttention(PagePool.plain(pool), 1, 1.0, kernels).begin(batch)
    k = torch.zeros_like(values)
    out = step.attend(0, step.store(0, k.clone(), k, values))
    assert torch.equal(out.view_as(values), values)
