"""The Triton kernels of 4-bit pages in the interpreter: the bits that torch packs, the rows that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.page_forms.test_page_forms import LAYER, Prompts
from tests.unit.kernels.pools.whole_pool import pool_over
from twostroke.kernels.attention.interface import AttentionStep, RaggedBatch
from twostroke.kernels.attention.spans import Spans, TokenSlots
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.page_forms.nibble_attention import NibbleAttention
from twostroke.kernels.page_forms.nibble_pool import NibblePool
from twostroke.kernels.pools.parted_pool import (
    AnyPool,
    PartedDeviceAttention,
    PartedPool,
    RecordedAttention,
    exact_places,
    parts_of,
)
from twostroke.kernels.triton.attention import TritonAttention
from twostroke.kernels.triton.decode import DecodeTuning
from twostroke.kernels.triton.page_forms.nibble_attention import TritonNibbleAttention
from twostroke.kv_cache.form import page_form
from twostroke.page_forms.int4 import BLOCK
from twostroke.page_forms.page_form import PageShape

SLACK = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 5e-3}
"""The interpreter cuts float32 off to bfloat16 where devices and torch round it: twice the error."""
SMALL = DecodeTuning(keys=32, warps=4, stages=2, least_share=32)
Chunks = list[tuple[int, int, int]]


class Interpreted:
    """The backend beside torch's, each over pages of its own, with exact pages of a fixed number."""

    def __init__(self, prompts: Prompts, multiprocessors: int, stale: int = 0xFF) -> None:
        pages, shape = len(prompts.lengths) * prompts.blocks, prompts.shape
        data = prompts.data("int4", stale)
        exact = ExactPages.fixed(pages, pages, shape, prompts.dtype, torch.device("cpu"))
        exact.pool.numbers.fill_(float("nan"))
        self.prompts = prompts
        self.pool = NibblePool.over(data, shape, prompts.dtype, exact)
        self.backend = TritonNibbleAttention(self.pool, prompts.heads, prompts.scale, tuning=SMALL)
        self.backend.multiprocessors = multiprocessors

    def run(self, chunks: Chunks) -> torch.Tensor:
        batch = self.prompts.batch(chunks)
        batch = replace(batch, exact_slots=self.pool.exact.begin(batch))
        parts = [[x[start:end] for x in self.prompts.rows(sequence)] for sequence, start, end in chunks]
        q, k, v = (torch.cat(each).contiguous() for each in zip(*parts, strict=True))
        step = self.backend.begin(batch)
        return step.attend(LAYER, step.store(LAYER, q, k, v))


def in_torch(prompts: Prompts) -> tuple[NibblePool, torch.Tensor]:
    pool = NibblePool.over(prompts.data("int4"), prompts.shape, prompts.dtype)
    return pool, prompts.run(NibbleAttention(pool, prompts.heads, prompts.scale), prompts.whole())


def steps_of(lengths: tuple[int, ...], cuts: list[int]) -> list[Chunks]:
    """Steps in which each sequence advances by so many tokens, one after the other, until all are whole."""
    done, steps = [0] * len(lengths), []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        cut = cuts[len(steps) % len(cuts)]
        ends = [min(at + cut, length) for at, length in zip(done, lengths, strict=True)]
        steps.append([(row, at, end) for row, (at, end) in enumerate(zip(done, ends, strict=True)) if end > at])
        done = ends
    return steps


@settings(max_examples=2, deadline=None)
@given(
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 24, 64, 80, 128]),
    groups=st.sampled_from([1, 3, 4]),
    dtype=st.sampled_from(list(SLACK)),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=2).map(tuple),
    cuts=st.lists(st.sampled_from([5, 16, 21, 48, 90]), min_size=1, max_size=3).filter(lambda cuts: sum(cuts) > 15),
    multiprocessors=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_blocks_hold_what_torch_packs_and_rows_are_what_torch_computes_in_any_chunks(
    kv_heads: int,
    head_dim: int,
    groups: int,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    cuts: list[int],
    multiprocessors: int,
    seed: int,
) -> None:
    prompts = Prompts(PageShape(2, kv_heads, BLOCK, head_dim), kv_heads * groups, lengths, dtype, seed)
    right, expected = in_torch(prompts)
    ours = Interpreted(prompts, multiprocessors)
    actual = torch.empty_like(expected)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for chunks in steps_of(lengths, cuts):
        rows = torch.cat([torch.arange(starts[row] + start, starts[row] + end) for row, start, end in chunks])
        actual[rows] = ours.run(chunks)
    tables = prompts.batch(prompts.whole()).block_tables
    for sequence, length in enumerate(lengths):
        full = tables[sequence, : length // BLOCK].long()
        assert torch.equal(ours.pool.heads[full, LAYER], right.heads[full, LAYER])
        begun = tables[sequence, length // BLOCK :].long()
        assert (ours.pool.heads[begun] == 0xFF).all(), "a block is stored when its last token is"
    assert (ours.pool.heads[:, 1 - LAYER] == 0xFF).all()
    highest = max(prompts.rows(sequence)[2].abs().max().item() for sequence in range(len(lengths)))
    torch.testing.assert_close(actual, expected, rtol=SLACK[dtype], atol=SLACK[dtype] * max(1.0, highest / 3))


def test_one_plan_serves_whatever_the_device_tensors_hold_and_padding_harms_nobody() -> None:
    """What replaying a captured step does: same grid, same addresses, other tokens; the last row pads the batch."""
    lengths = (40, 18)
    prompts = Prompts(PageShape(2, 2, BLOCK, 64), 4, lengths, torch.float32, 7)
    right, expected = in_torch(prompts)
    ours = Interpreted(prompts, multiprocessors=4)
    pages = len(prompts.lengths) * prompts.blocks
    starts = [0, lengths[0]]
    ours.run([(0, 0, 20), (1, 0, 14)])
    fields, tables = torch.ones(3, 4, dtype=torch.int32), torch.zeros(3, prompts.blocks, dtype=torch.int32)
    fields[:, 0] = fields[:, 1] = torch.arange(3)
    slots = torch.zeros(3, dtype=torch.int64)
    exact_slots = torch.full((3,), pages * BLOCK)  # of the scratch page
    placement = TokenSlots(slots, torch.ones(3, 32), torch.zeros(3, 32), exact_slots)
    step = ours.backend.begin_decode(Spans(fields, tables, 1, prompts.blocks * BLOCK), placement)
    for turn in range(4):
        chunks = [(0, 20 + turn, 21 + turn), (1, 14 + turn, 15 + turn)]
        batch = prompts.batch(chunks)
        fields[:2, 3], tables[:2] = torch.tensor(batch.context_lens), batch.block_tables
        slots[:2], exact_slots[:2] = batch.write_slots, ours.pool.exact.begin(batch)
        slots[2] = slots[0]  # its block has no last token, so it is never stored
        parts = [[x[start:end] for x in prompts.rows(row)] for row, start, end in [*chunks, (0, 0, 1)]]
        q, k, v = (torch.cat(each).contiguous() for each in zip(*parts, strict=True))
        rows = step.attend(LAYER, step.store(LAYER, q, k, v))
        at = [starts[row] + start for row, start, _ in chunks]
        torch.testing.assert_close(rows[:2], expected[at], rtol=1e-4, atol=1e-4)
        assert rows[2].isfinite().all()
    full = prompts.batch(prompts.whole()).block_tables[:, 0].long()
    assert torch.equal(ours.pool.heads[full, LAYER], right.heads[full, LAYER])


def test_layers_of_parts_are_stored_and_attended_to_as_in_pools_of_their_forms_alone() -> None:
    """Also by a step that is planned once for tensors that are rewritten, as a recorded one is."""
    shape, layers = PageShape(3, 2, BLOCK, 64), range(3)
    prompts = Prompts(shape, 4, (21, 6), torch.float32, 5)
    pools = [
        pool_over(prompts.data(form, 0xFF), page_form(form), shape, prompts.dtype, None, exact_pages_of(prompts))
        for form in ("int4+1xfloat32", "float32", "int4")
    ]
    backends = [interpreted(pool, prompts) for pool in pools]
    chunks = [(0, 0, 20), (1, 0, 5)]
    q, k, v = heads_of(prompts, chunks)
    steps = [begun(backend, pool, prompts.batch(chunks)) for backend, pool in zip(backends, pools, strict=True)]
    for layer in layers:
        ours, *theirs = (step.attend(layer, step.store(layer, q, k, v)) for step in steps)
        assert torch.equal(ours, theirs[layer == 1])
    chunks = [(0, 20, 21), (1, 5, 6)]
    batch = prompts.batch(chunks)
    fields = torch.tensor([[0, 0, 1, 21], [1, 1, 1, 6]], dtype=torch.int32)
    q, k, v = heads_of(prompts, chunks)
    spans, rows = Spans(fields, batch.block_tables, 1, prompts.blocks * BLOCK), []
    for backend, pool in zip(backends, pools, strict=True):
        slots = exact_places(pool).begin(np.arange(2), batch.block_tables.numpy(), batch.positions.numpy(), ())
        placement = TokenSlots(batch.write_slots, batch.cosines, batch.sines, torch.from_numpy(slots))
        step = backend.begin_decode(spans, placement)
        rows.append([step.attend(layer, step.store(layer, q, k, v)) for layer in layers])
    for layer in layers:
        assert torch.equal(rows[0][layer], rows[1 + (layer == 1)][layer])


def exact_pages_of(prompts: Prompts) -> Callable[[PageShape], ExactPages]:
    pages = len(prompts.lengths) * prompts.blocks
    return lambda shape: ExactPages.fixed(pages, pages, shape, prompts.dtype, torch.device("cpu"))


def interpreted(pool: AnyPool, prompts: Prompts) -> RecordedAttention:
    backends: list[RecordedAttention] = []
    for part in parts_of(pool):
        if isinstance(part, NibblePool):
            backends.append(TritonNibbleAttention(part, prompts.heads, prompts.scale, tuning=SMALL))
        else:
            backends.append(TritonAttention(part, prompts.heads, prompts.scale, decode=SMALL))
    return PartedDeviceAttention(pool, backends) if isinstance(pool, PartedPool) else backends[0]


def begun(backend: RecordedAttention, pool: AnyPool, batch: RaggedBatch) -> AttentionStep:
    rows = np.repeat(np.arange(batch.sequences), np.diff(batch.query_starts))
    slots = exact_places(pool).begin(rows, batch.block_tables.numpy(), batch.positions.numpy(), ())
    return backend.begin(replace(batch, exact_slots=torch.from_numpy(slots)))


def heads_of(prompts: Prompts, chunks: Chunks) -> tuple[torch.Tensor, ...]:
    parts = [[x[start:end] for x in prompts.rows(sequence)] for sequence, start, end in chunks]
    return tuple(torch.cat(each).contiguous() for each in zip(*parts, strict=True))


def test_warming_up_touches_nothing() -> None:
    prompts = Prompts(PageShape(2, 2, BLOCK, 64), 8, (20,), torch.float32)
    ours = Interpreted(prompts, multiprocessors=4)
    ours.backend.warm_up()
    assert (ours.pool.heads == 0xFF).all()
    assert ours.pool.exact.pool.numbers.isnan().all()
