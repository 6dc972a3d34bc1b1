"""Prefill attention over pages, in tiles of query rows, causal by position. It is bound by arithmetic.

A span is one tile; the host cuts chunks into them (`spans.cut_into_tiles`). A program takes one tile and one query
head. It walks the context in tiles of keys, which it gathers through the block table. Keys that all rows attend to come
first, without masks. The diagonal follows. Where a rule hides keys, the program begins with the first one that any row
attends to. It uses masks until all rows attend to a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.kernels.attention.rules import AnyRules, rule_of
from twostroke.kernels.attention.spans import Spans
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.triton.bytes import decoded
from twostroke.kernels.triton.checks import (
    check_heads,
    check_pool,
    check_sinks,
    check_spans,
    pool_arguments,
    scales_of,
    sinks_of,
)
from twostroke.kernels.triton.decode import HOPPER_SHARED_BYTES
from twostroke.kernels.triton.rules import capped, first_seen, is_seen, rule_arguments, score_factors, with_sink


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    rows: int
    """Query rows per tile."""
    keys: int
    """Tokens of context per iteration."""
    warps: int
    stages: int


def prefill_tuning(head_dim: int, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED_BYTES) -> PrefillTuning:
    """Returns the tuning. On Hopper two warp groups of 64 rows have one tile of keys in use and one in flight.

    There are three stages, because a tile stays in use until the matrix product of the next one has begun. Other
    devices get what fits.
    """
    if dtype == torch.float32:
        return PrefillTuning(rows=32, keys=32, warps=4, stages=2)
    if shared_bytes < HOPPER_SHARED_BYTES:
        return PrefillTuning(rows=64, keys=32, warps=4, stages=3 if head_dim <= 128 else 2)
    if head_dim <= 128:
        return PrefillTuning(rows=128, keys=128, warps=8, stages=3)
    return PrefillTuning(rows=128, keys=32, warps=8, stages=3)


def prefill_attention(
    q: torch.Tensor,
    pool: PagePool,
    layer: int,
    spans: Spans,
    rules: AnyRules,
    out: torch.Tensor,
    tuning: PrefillTuning,
    sinks: torch.Tensor | None = None,
) -> None:
    """Writes attention of the spans' rows of q [T, heads, D] into the same rows of out. Other rows do not change.

    `sinks`: float32 [heads], one more score of each head's softmax.
    """
    check_pool(pool, layer)
    check_sinks(sinks, q)
    check_heads("q", q, pool, q.dtype)
    check_heads("out", out, pool, q.dtype, q.shape[1])
    check_spans(spans, pool)
    assert spans.most_rows <= tuning.rows, f"a tile has {tuning.rows} rows, a span {spans.most_rows}"
    kv_heads, dim = pool.kv_heads, pool.head_dim
    heads, rule = q.shape[1], rule_of(rules, layer)
    prefill_kernel[(heads, len(spans.fields))](
        q, out, pool.numbers, scales_of(pool), sinks_of(sinks, q), spans.block_tables, spans.fields,
        q.stride(0), out.stride(0), spans.block_tables.stride(0), pool.numbers.stride(0), layer,
        *score_factors(rule), **rule_arguments(rule, sinks),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
        **pool_arguments(pool), ROWS=tuning.rows, KEYS=tuning.keys, num_warps=tuning.warps, num_stages=tuning.stages,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def walk_keys(
    acc, best, total, query, keys_base, scales_base, table, last, first, d, inside, begin, end, page_stride,
    scale_log2, cap_log2,
    VALUES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, PADDED: tl.constexpr,
    MASKED: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Walks the positions begin..end. Unless MASKED, they are whole tiles and every row attends to all of them.

    Nothing before the position `first` is read.
    """
    factor = scale_log2  # of scores; capped scores have their final scale already
    if CAPPED:
        factor = 1.0
    at = begin + tl.arange(0, KEYS)
    # the page of each token of the first tile
    page = tl.load(table + at // BLOCK, mask=at < end, other=0)
    for start in tl.range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        valid = at < end
        if WINDOW != 0:
            valid &= at >= first
        # K: page, offset in the block, d; V: VALUES further
        place = page.to(tl.int64) * page_stride
        key_at = keys_base + (place + (at % BLOCK) * DIM)[:, None] + d[None, :]
        # scales: page, offset in the block
        scale_at = scales_base + place // 4 + at % BLOCK
        if MASKED:
            keys = tl.load(key_at, mask=valid[:, None] & inside[None, :], other=0)
            values = tl.load(key_at + VALUES, mask=valid[:, None] & inside[None, :], other=0)
        elif PADDED:
            keys = tl.load(key_at, mask=inside[None, :], other=0)
            values = tl.load(key_at + VALUES, mask=inside[None, :], other=0)
        else:
            keys = tl.load(key_at)
            values = tl.load(key_at + VALUES)
        # the page of each token of the next tile
        page = tl.load(table + (at + KEYS) // BLOCK, mask=at + KEYS < end, other=0)
        keys, values = decoded(keys, KIND).to(query.dtype), decoded(values, KIND)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
        if KIND != 0:
            scores *= tl.load(scale_at, mask=valid, other=0.0)[None, :]
            values *= tl.load(scale_at + VALUES // 4, mask=valid, other=0.0)[:, None]
        values = values.to(query.dtype)
        if CAPPED:
            scores = capped(scores * scale_log2, cap_log2, CAPPED)
        if MASKED:
            scores = tl.where(is_seen(at, last, WINDOW), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1) * factor)
        pivot = higher
        if WINDOW != 0:
            pivot = tl.where(higher == float("-inf"), 0.0, higher)  # a row may have attended to nothing yet
        decay = tl.exp2(best - pivot)
        weight = tl.exp2(scores * factor - pivot[:, None])
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(values.dtype), values, acc * decay[:, None], input_precision="tf32x3")
        best = higher
    return acc, best, total


@triton.jit(do_not_specialize=["layer", "table_stride"], do_not_specialize_on_alignment=["block_tables", "fields"])
def prefill_kernel(
    q, out, pool, scales, sinks, block_tables, fields,
    q_stride, out_stride, table_stride, page_stride, layer,
    scale_log2, cap_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    LAYER: tl.constexpr, VALUES: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # heads fastest: those that share a K/V head run together and find its pages in the cache
    head, span = tl.program_id(0), tl.program_id(1)
    table_row = tl.load(fields + span * 4)
    first_row = tl.load(fields + span * 4 + 1)
    rows = tl.load(fields + span * 4 + 2)
    context = tl.load(fields + span * 4 + 3)
    row = tl.arange(0, ROWS)
    # the last position that the row attends to; rows past the span's attend to no less, so no row is without a key
    last = context - rows + row
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    asked = (row < rows)[:, None] & inside[None, :]
    query_row = (first_row + row).to(tl.int64)
    # q: row, head, d
    query = tl.load(q + (query_row * q_stride + head * DIM)[:, None] + d[None, :], mask=asked, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    # K of this layer and head in page 0
    head_at = layer.to(tl.int64) * LAYER + (head // GROUP) * HEAD
    keys_base, scales_base = pool + head_at, scales + head_at // 4
    table = block_tables + table_row.to(tl.int64) * table_stride
    seen_by_all = (context - rows + 1) // KEYS * KEYS
    first = first_seen(context, rows, WINDOW)
    begin = first
    if WINDOW != 0:
        # tiles that are in the window of only some rows
        begin = tl.minimum(tl.cdiv(tl.maximum(context - WINDOW, 0), KEYS) * KEYS, context)
        seen_by_all = tl.maximum(begin, seen_by_all)
        acc, best, total = walk_keys(
            acc, best, total, query, keys_base, scales_base, table, last, first, d, inside, first // KEYS * KEYS, begin,
            page_stride, scale_log2, cap_log2,
            VALUES, DIM, BLOCK, KEYS, DIM_PAD != DIM, True, KIND, WINDOW, CAPPED,
        )  # fmt: skip
    acc, best, total = walk_keys(
        acc, best, total, query, keys_base, scales_base, table, last, first, d, inside, begin, seen_by_all,
        page_stride, scale_log2, cap_log2,
        VALUES, DIM, BLOCK, KEYS, DIM_PAD != DIM, False, KIND, WINDOW, CAPPED,
    )  # fmt: skip
    acc, best, total = walk_keys(
        acc, best, total, query, keys_base, scales_base, table, last, first, d, inside, seen_by_all, context,
        page_stride, scale_log2, cap_log2,
        VALUES, DIM, BLOCK, KEYS, DIM_PAD != DIM, True, KIND, WINDOW, CAPPED,
    )  # fmt: skip
    if HAS_SINKS:
        acc, total = with_sink(acc, best, total, tl.load(sinks + head))
    # out: row, head, d
    out_at = out + (query_row * out_stride + head * DIM)[:, None] + d[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=asked)
