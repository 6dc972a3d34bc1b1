"""Every form of pages, with every build of the native kernels and without one: one suite.

A page is a function of the tokens in it. A row of attention is a function of its query and of the pages that it sees.
Neither depends on chunks, on neighbours, or on what lay in a page before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import pairwise
from tests.unit.kernels.cpu.test_attention import in_pieces, row_of
from tests.unit.kernels.pools.whole_pool import pool_over
from tests.unit.kernels.variants import LATER_OF_PARTS, VARIANTS
from twostroke.base.errors import ConfigError
from twostroke.config.cache import KV_FORMATS
from twostroke.kernels import choice, reference
from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu import attention as native
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.pools.page_pool import BYTES, LARGEST, PLAIN, PagePool, quantised
from twostroke.kernels.pools.parted_pool import AnyPool, parts_of
from twostroke.kv_cache.form import FORMS, page_form
from twostroke.page_forms.page_form import PageShape

TORCH = "torch"
ALIGNED = "torch, deterministic"
PATHS = [*VARIANTS, TORCH, ALIGNED]
BY_TOKEN = [form for form in KV_FORMATS if not FORMS[form].spans_block]
"""Forms that store each token on its own."""
STEADY = [*VARIANTS, ALIGNED]
"""Paths that promise the same bits in any chunks and company."""
SLACK = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
LAYER = 1

shapes = st.builds(
    PageShape,
    layers=st.just(2),
    kv_heads=st.integers(1, 3),
    block=st.sampled_from([4, 16, 32]),
    head_dim=st.sampled_from([8, 20, 64, 80, 96, 128]),
)


@pytest.mark.parametrize("form", KV_FORMATS)
def test_every_format_that_can_be_asked_for_is_a_form_and_has_kernels(form: str) -> None:
    prompts = Prompts(PageShape(2, 2, 16, 64), 4, (5,), torch.bfloat16)
    (pool,) = parts_of(prompts.over(prompts.data(form), form))
    assert pool.form is FORMS[form]
    assert (pool.layers, pool.kv_heads, pool.block, pool.head_dim) == (2, 2, 16, 64)
    assert pool.dtype == (PLAIN.get(form) or pool.dtype)
    assert (pool.exact is not None) == FORMS[form].spans_block


def test_a_form_that_native_kernels_do_not_know_is_computed_by_torch(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = Prompts(PageShape(4, 2, 16, 64), 4, (5,), torch.bfloat16)
    monkeypatch.setattr(choice, "NATIVE_FORMS", ("bfloat16",))
    found = {
        form: choose_attention(
            prompts.over(prompts.data(form), form), heads=4, rules=1.0, kernels=kernels, dtype=torch.bfloat16
        )
        for form in ("bfloat16", "int8", "int8+1xbfloat16", "int4")
    }
    assert {form: isinstance(each, NativeAttention) for form, each in found.items()} == {
        "bfloat16": True,
        "int8": False,
        "int8+1xbfloat16": False,
        "int4": False,
    }


@dataclass(frozen=True, eq=False)
class Prompts:
    """Sequences whose pages lie scattered, and the tokens of all of them."""

    shape: PageShape
    heads: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    seed: int = 0
    is_centered: bool = False
    """A few channels of all keys have something large in common, which their centers are near to."""

    @property
    def key_centers(self) -> torch.Tensor | None:
        if not self.is_centered:
            return None
        draw = torch.Generator().manual_seed(self.seed)
        centers = torch.randn(self.shape.layers, self.shape.kv_heads, self.shape.head_dim, generator=draw)
        centers[..., ::8] *= 40
        return centers

    @property
    def blocks(self) -> int:
        return -(-max(self.lengths) // self.shape.block)

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def rows(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, some of which are large, small or zero."""
        draw = torch.Generator().manual_seed(self.seed * 100 + sequence)
        heads = (self.heads, self.shape.kv_heads, self.shape.kv_heads)
        fused = torch.randn(self.lengths[sequence], sum(heads), self.shape.head_dim, generator=draw)
        fused[1::7, self.heads :] *= 4
        fused[2::7, self.heads :] *= 1e-3
        fused[3::17, self.heads :] = 0
        if self.key_centers is not None:
            fused[:, self.heads : self.heads + self.shape.kv_heads] += self.key_centers[LAYER]
        q, k, v = fused.to(self.dtype).split(heads, dim=1)
        return q, k, v

    def batch(self, spans: list[tuple[int, int, int]]) -> RaggedBatch:
        """Returns the step that computes (sequence, from, to) of each; keys are not rotated, so none is rounded."""
        tables = torch.randperm(len(self.lengths) * self.blocks, generator=torch.Generator().manual_seed(self.seed))
        tables = tables.view(len(self.lengths), self.blocks).int()
        at = [torch.arange(start, end) for _, start, end in spans]
        block = self.shape.block
        slots = [tables[span[0], x // block].long() * block + x % block for span, x in zip(spans, at, strict=True)]
        counts = [0, *(end - start for _, start, end in spans)]
        positions = torch.cat(at)
        return RaggedBatch(
            positions=positions.int(),
            query_starts=tuple(torch.tensor(counts).cumsum(0).tolist()),
            context_lens=tuple(end for *_, end in spans),
            block_tables=tables[[span[0] for span in spans]].contiguous(),
            write_slots=torch.cat(slots),
            cosines=torch.ones(len(positions), self.shape.head_dim // 2),
            sines=torch.zeros(len(positions), self.shape.head_dim // 2),
        )

    def data(self, form: str, stale: int = 0) -> torch.Tensor:
        """Returns pages in which every byte is `stale`."""
        pages = len(self.lengths) * self.blocks
        return torch.full((pages, page_form(form).page_bytes(self.shape)), stale, dtype=torch.uint8)

    def over(self, data: torch.Tensor, form: str) -> AnyPool:
        return pool_over(data, page_form(form), self.shape, self.dtype, self.key_centers)

    def pool(self, form: str) -> PagePool:
        """Returns pages of a form that stores each token on its own."""
        return PagePool.over(self.data(form), FORMS[form], self.shape, self.key_centers)

    def run(self, backend: AttentionBackend, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """Stores and attends; the outputs of all rows."""
        batch = self.batch(spans)
        parts = [[x[start:end] for x in self.rows(sequence)] for sequence, start, end in spans]
        q, k, v = (torch.cat(each).contiguous() for each in zip(*parts, strict=True))
        step = backend.begin(batch)
        return step.attend(LAYER, step.store(LAYER, q, k, v))

    def whole(self) -> list[tuple[int, int, int]]:
        return [(sequence, 0, length) for sequence, length in enumerate(self.lengths)]


def backend_of(prompts: Prompts, pool: AnyPool, path: str, kernels: Mapping[str, Kernels]) -> AttentionBackend:
    return choose_attention(
        pool,
        heads=prompts.heads,
        rules=prompts.scale,
        kernels=kernels.get(path),
        dtype=prompts.dtype,
        is_deterministic=path != TORCH,
    )


def same_pages(ours: PagePool, theirs: PagePool) -> bool:
    """Whether both store the same bits. What was never written may be no number."""
    pairs = [(ours.numbers, theirs.numbers)]
    if ours.scales is not None and theirs.scales is not None:
        pairs.append((ours.scales, theirs.scales))
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def as_torch_reads(pool: PagePool, dtype: torch.dtype) -> PagePool:
    """Returns what torch multiplies: numbers times scales, rounded to the dtype of queries."""
    every = torch.arange(len(pool.numbers))
    return PagePool.plain(torch.stack([pool.read(every, layer) for layer in range(LAYER + 1)], dim=1).to(dtype))


def random_history(prompts: Prompts, seed: int) -> Iterator[list[tuple[int, int, int]]]:
    """Steps that compute all prompts, in chunks of any size, in any company."""
    draw, done = random.Random(seed), [0] * len(prompts.lengths)
    while left := [s for s, length in enumerate(prompts.lengths) if done[s] < length]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        spans = [(s, done[s], min(prompts.lengths[s], done[s] + draw.choice((1, 1, 3, 16, 40, 300)))) for s in chosen]
        yield spans
        for sequence, _, end in spans:
            done[sequence] = end


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", BY_TOKEN)
@settings(max_examples=5, deadline=None)
@given(
    shape=shapes,
    groups=st.integers(1, 9),
    dtype=st.sampled_from(list(SLACK)),
    lengths=st.lists(st.integers(1, 60) | st.integers(1, 600), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 99),
)
def test_pages_hold_what_the_reference_writes_and_rows_come_out_as_it_computes_them(
    built_parts: Mapping[str, Kernels],
    path: str,
    form: str,
    shape: PageShape,
    groups: int,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    seed: int,
) -> None:
    is_centered = form in BYTES and seed % 2 == 1
    prompts = Prompts(shape, shape.kv_heads * groups, lengths, dtype, seed, is_centered)
    pool, right = prompts.pool(form), prompts.pool(form)
    actual = prompts.run(backend_of(prompts, pool, path, built_parts), prompts.whole())
    batch = prompts.batch(prompts.whole())
    q, k, v = (torch.cat(each) for each in zip(*map(prompts.rows, range(len(lengths))), strict=True))
    right.write(reference.rotate(k, batch.cosines, batch.sines), v, LAYER, batch.write_slots)
    read = right if path in built_parts else as_torch_reads(right, dtype)
    expected = reference.paged_attention(q, read, LAYER, batch, prompts.scale).flatten(1)
    stored = replace(right, numbers=in_pieces(right.numbers)) if path in built_parts else right
    assert same_pages(pool, stored)
    slack = SLACK[dtype] if form == str(dtype).removeprefix("torch.") or form in BYTES else SLACK[torch.bfloat16]
    torch.testing.assert_close(actual, expected, rtol=slack, atol=slack * v.abs().max().item() / 3)


@pairwise(later=LATER_OF_PARTS, path=STEADY, form=KV_FORMATS, dtype=[torch.bfloat16, torch.float32])
def test_no_chunk_no_neighbour_and_no_stale_byte_changes_a_bit(
    built_parts: Mapping[str, Kernels], path: str, form: str, dtype: torch.dtype
) -> None:
    lengths = (700, 33, 300) if path in built_parts else (60, 33)
    for seed, block in enumerate((16,) if FORMS[form].spans_block else (16, 4)):
        prompts = Prompts(PageShape(2, 2, block, 64), 6, lengths, dtype, seed, is_centered=form in BYTES)
        whole = prompts.data(form)
        expected = prompts.run(backend_of(prompts, prompts.over(whole, form), path, built_parts), prompts.whole())
        starts = [sum(lengths[:sequence]) for sequence in range(len(lengths))]
        for stale in (0x7F, 0xFF):
            data = prompts.data(form, stale)
            backend = backend_of(prompts, prompts.over(data, form), path, built_parts)
            for spans in random_history(prompts, seed * 10 + stale):
                actual = prompts.run(backend, spans)
                wanted = [expected[starts[s] + start : starts[s] + end] for s, start, end in spans]
                assert torch.equal(actual, torch.cat(wanted)), (spans, stale)
            for sequence, length in enumerate(prompts.lengths):
                full = prompts.batch([(sequence, 0, length)]).block_tables[0, : length // block].long()
                stored = [each.view(len(each), 2, -1)[full, LAYER] for each in (data, whole)]
                assert torch.equal(*stored), "the bytes of a full page depend on how it was filled"


@pytest.mark.parametrize("path", VARIANTS)
@pytest.mark.parametrize("form", native.FORMS)
def test_a_row_is_the_same_with_one_thread_and_two(built_parts: Mapping[str, Kernels], path: str, form: str) -> None:
    prompts = Prompts(PageShape(2, 3, 16, 64), 9, (1100, 150, 40), torch.bfloat16)
    pool = prompts.over(prompts.data(form), form)
    together = prompts.run(backend_of(prompts, pool, path, built_parts), prompts.whole())
    team = Team(built_parts[path], (0, 1))
    try:
        backend = NativeAttention(pool, 9, prompts.scale, built_parts[path], team, torch.bfloat16)
        batch, q = prompts.batch(prompts.whole()), torch.cat([prompts.rows(s)[0] for s in range(3)]).contiguous()
        with team.step():
            assert torch.equal(backend.begin(batch).attend(LAYER, q), together)
            for sequence, row in ((0, 1099), (1, 1100), (2, 1289), (0, 300)):
                alone = backend.begin(row_of(batch, sequence, row)).attend(LAYER, q[row : row + 1])
                assert torch.equal(alone[0], together[row])
    finally:
        team.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", BYTES)
def test_keys_are_stored_less_their_centers_and_attention_is_nearer_to_that_of_exact_pages(
    built_parts: Mapping[str, Kernels], path: str, form: str
) -> None:
    """Keys that had no center to lose are the same keys less the centers, in float32, which rounds none of them."""
    prompts = Prompts(PageShape(2, 3, 16, 64), 6, (100, 33), torch.float32, is_centered=True)
    pool, less, whole, exact = (prompts.pool(name) for name in (form, form, form, "float32"))
    assert pool.key_centers is not None
    off = []
    _, k, v = (torch.cat(each) for each in zip(*map(prompts.rows, range(2)), strict=True))
    bare = replace(less, key_centers=None)
    bare.write(k - pool.key_centers[LAYER], v, LAYER, prompts.batch(prompts.whole()).write_slots)
    right = prompts.run(backend_of(prompts, exact, path, built_parts), prompts.whole())
    for each in (pool, replace(whole, key_centers=None)):
        found = prompts.run(backend_of(prompts, each, path, built_parts), prompts.whole())
        off.append((found - right).square().mean())
    stored = replace(bare, numbers=in_pieces(bare.numbers)) if path in built_parts else bare
    assert same_pages(pool, stored)
    assert off[0] < off[1] / 2


@pytest.mark.parametrize("form", BYTES)
def test_a_number_is_off_by_no_more_than_its_form_rounds(form: str) -> None:
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-8, 8, 200)[:, None]
    numbers, scales = quantised(rows, form)
    read = numbers.view(BYTES[form]).float() * scales[:, None]
    relative = {"int8": 0.0, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[form]
    absolute = {"int8": 0.5, "fp8_e4m3": 2.0**-10, "fp8_e5m2": 2.0**-17}[form]
    assert ((read - rows).abs() <= (rows.abs() * relative + absolute * scales[:, None]) * 1.0001).all()
    peaks = numbers.view(BYTES[form]).float().abs().amax(dim=1)
    assert (peaks == LARGEST[form]).all(), "the largest number of a row is the largest that there is"


@pytest.mark.parametrize("path", VARIANTS)
@pytest.mark.parametrize("form", BYTES)
def test_every_byte_is_read_as_the_number_that_it_is(built_parts: Mapping[str, Kernels], path: str, form: str) -> None:
    """Attention to one token gives its value: 256 tokens, each alone, whose values are all one byte."""
    shape = PageShape(1, 1, 16, 32)
    for dtype in (torch.bfloat16, torch.float32):
        pool = PagePool.empty(256, form, shape)
        assert pool.scales is not None
        pool.numbers[:, 0, 1] = in_pieces_of_bytes(shape)
        pool.scales.fill_(1.0)
        batch = RaggedBatch(
            positions=torch.zeros(256, dtype=torch.int32),
            query_starts=tuple(range(257)),
            context_lens=(1,) * 256,
            block_tables=torch.arange(256, dtype=torch.int32)[:, None],
            write_slots=torch.arange(256) * 16,
            cosines=torch.ones(256, 16),
            sines=torch.zeros(256, 16),
        )
        backend = NativeAttention(pool, 1, 1.0, built_parts[path], None, dtype)
        out = backend.begin(batch).attend(0, torch.zeros(256, 1, 32, dtype=dtype)).float()
        truth = torch.arange(256).to(torch.uint8).view(BYTES[form]).float()
        is_finite = truth.isfinite()
        assert torch.equal(out[is_finite], truth[is_finite, None].expand(-1, 32))
        assert out.isfinite().all(), "what was never written must be a number, since it is multiplied by zero"


def in_pieces_of_bytes(shape: PageShape) -> torch.Tensor:
    """Values of 256 pages: page i holds byte i everywhere, so that their order does not matter."""
    return torch.arange(256).to(torch.uint8)[:, None, None, None].expand(-1, 1, shape.block, shape.head_dim)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", BYTES)
def test_a_row_that_is_no_number_or_endless_is_not_taken_for_one(
    built_parts: Mapping[str, Kernels], path: str, form: str
) -> None:
    for bad in (float("nan"), float("inf")):
        prompts = Prompts(PageShape(2, 1, 16, 64), 2, (5,), torch.bfloat16)
        pool = prompts.pool(form)
        backend = backend_of(prompts, pool, path, built_parts)
        q, k, v = prompts.rows(0)
        v = v.clone()
        v[2, 0, 9] = bad
        step = backend.begin(prompts.batch([(0, 0, 5)]))
        out = step.attend(LAYER, step.store(LAYER, q.contiguous(), k.contiguous(), v))
        assert not out[4].isfinite().all()


def test_scales_that_would_not_be_aligned_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"--kv-format int8 needs blocks of a multiple of 2 tokens for heads of 6"):
        PagePool.empty(1, "int8", PageShape(1, 1, 1, 6))
    PagePool.empty(1, "int8", PageShape(1, 1, 2, 6))
