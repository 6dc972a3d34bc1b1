"""Attention over 4-bit pages: a row attends to its own block's exact numbers, and to the stored numbers of the blocks
before it.

One kernel computes decode and prefill. The query heads that share a K/V head, for all rows of the span, are packed into
one matrix operand. So each stored number is decoded once for all of them. Contexts are split among programs and merged
as in decode.py; the program of a context's last share walks the exact blocks too, before its stored ones.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.attention.rules import AnyRules, rule_of
from twostroke.kernels.attention.spans import Spans
from twostroke.kernels.page_forms.nibble_pool import NibblePool
from twostroke.kernels.triton.checks import check_heads, check_sinks, check_spans, sinks_of
from twostroke.kernels.triton.decode import (
    MERGE_CHUNK,
    DecodePlan,
    merge_kernel,
    share_of,
    store_share,
    weighed,
)
from twostroke.kernels.triton.page_forms.nibbles import dims_of, exact_arguments, stored_keys, stored_values
from twostroke.kernels.triton.rules import capped, first_seen, is_seen, rule_arguments, score_factors, with_sink
from twostroke.page_forms.int4 import BLOCK

LEAST_ROWS: Final = 16
"""The least height of a matrix operand on a device."""


def nibble_attention(
    q: torch.Tensor,
    pool: NibblePool,
    layer: int,
    spans: Spans,
    exact_slots: torch.Tensor,
    rules: AnyRules,
    out: torch.Tensor,
    plan: DecodePlan,
    sinks: torch.Tensor | None = None,
) -> None:
    """Writes attention of the spans' rows of q [T, heads, D] into the same rows of out. Other rows do not change.

    `exact_slots` is int64 [T]: exact page * block + offset of each row. The blocks before a row's own are stored.
    `sinks`: float32 [heads], one more score of each head's softmax.
    """
    check_sinks(sinks, q)
    exact = pool.exact.pool
    check_heads("q", q, exact, exact.numbers.dtype)
    check_heads("out", out, exact, q.dtype, q.shape[1])
    check_spans(spans, exact)
    assert exact_slots.shape == (len(q),), f"each row has an exact slot, got {tuple(exact_slots.shape)}"
    kv_heads, group = pool.kv_heads, q.shape[1] // pool.kv_heads
    packed, count, splits, tuning = spans.most_rows * group, len(spans.fields), plan.splits, plan.tuning
    assert plan.weights.shape[:3] == (count, kv_heads, packed), "the plan was made for other spans"
    words, halves, dims = pool.heads.view(torch.int32), pool.heads.view(torch.float16), dims_of(pool)
    shape = {"KV_HEADS": kv_heads, "GROUP": group}
    rule = rule_of(rules, layer)
    kind = rule_arguments(rule, sinks)
    share = {"KEYS": tuning.keys, "LEAST_SHARE": tuning.least_share, "WINDOW": kind.pop("WINDOW")}
    nibble_kernel[(kv_heads, splits, count)](
        q, out, plan.partials, plan.weights, words, halves, exact.numbers, sinks_of(sinks, q),
        spans.block_tables, spans.fields, exact_slots,
        q.stride(0), out.stride(0), spans.block_tables.stride(0), words.stride(0), exact.numbers.stride(0),
        layer, words.stride(1), words.stride(2), packed, splits, *score_factors(rule),
        **shape, **share, **kind, **dims, **exact_arguments(pool),
        EXACT_KEYS=BLOCK if spans.most_rows == 1 else tuning.keys,
        PACKED_PAD=max(LEAST_ROWS, triton.next_power_of_2(packed)), WHOLE=splits == 1,
        num_warps=tuning.warps, num_stages=tuning.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(kv_heads, packed, count)](
            out, plan.partials, plan.weights, sinks_of(sinks, q), spans.fields, out.stride(0), packed, splits,
            **shape, **share, HAS_SINKS=kind["HAS_SINKS"],
            DIM=dims["DIM"], DIM_PAD=dims["DIM_PAD"], CHUNK=MERGE_CHUNK, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def absorbed(acc, best, total, scores, values):
    """Returns the sum of weighted values, the highest score (base 2) and the sum of weights, with those of another tile
    added."""
    weight, best, total, decay = weighed(best, total, scores)
    acc = tl.dot(weight.to(values.dtype), values, acc * decay[:, None], input_precision="tf32x3")
    return acc, best, total


@triton.jit
def walk_exact(
    acc, best, total, query, exact_base, exact_slots, last, first_position, d, inside, begin, end, exact_stride,
    scale_log2, cap_log2,
    DIM: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Walks positions begin..end in exact pages: each row attends to those of its own block up to itself.

    `exact_slots` begins with the span's first row, at `first_position`.
    """
    for start in tl.range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        valid = at < end
        # slots: a row in the same block, which the span's first row is for the tokens before it
        row = tl.maximum(at // 16 * 16 - first_position, 0)
        slot = tl.load(exact_slots + row, mask=valid, other=0)
        # K: slot, offset in the block, d; V: VALUES further
        key_at = exact_base + (slot // 16 * exact_stride + (at % 16) * DIM)[:, None] + d[None, :]
        mask = valid[:, None] & inside[None, :]
        keys = tl.load(key_at, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale_log2
        seen = (at // 16)[None, :] == (last // 16)[:, None]
        seen &= valid[None, :] & is_seen(at, last, WINDOW)
        scores = capped(scores, cap_log2, CAPPED)
        values = tl.load(key_at + VALUES, mask=mask, other=0.0)
        acc, best, total = absorbed(acc, best, total, tl.where(seen, scores, float("-inf")), values)
    return acc, best, total


@triton.jit
def walk_stored(
    acc, best, total, query, words, halves, head_at, table, last, first, begin, end, page_stride, scale_log2, cap_log2,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Walks positions begin..end in stored pages, whole blocks: each row attends to those before its own block.

    No block before that of the position `first` is read.
    """
    BLOCKS: tl.constexpr = KEYS // 16
    for start in tl.range(begin, end, KEYS):
        block = start // 16 + tl.arange(0, BLOCKS)
        exists = block * 16 < end
        if WINDOW != 0:
            exists &= block >= first // 16
        # words: page, layer and head
        place = tl.load(table + block, mask=exists, other=0).to(tl.int64) * page_stride + head_at
        keys = stored_keys(words, halves, place, exists, DIM, DIM_PAD, BLOCKS).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale_log2
        at = start + tl.arange(0, KEYS)
        seen = (at < end)[None, :] & ((at // 16)[None, :] < (last // 16)[:, None])
        if WINDOW != 0:
            seen &= at[None, :] > last[:, None] - WINDOW
        scores = capped(scores, cap_log2, CAPPED)
        values = stored_values(words, halves, place, exists, DIM, DIM_PAD, WIDTH, BLOCKS).to(query.dtype)
        acc, best, total = absorbed(acc, best, total, tl.where(seen, scores, float("-inf")), values)
    return acc, best, total


@triton.jit(
    do_not_specialize=["layer", "packed", "splits", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "fields", "exact_slots"],
)
def nibble_kernel(
    q, out, partials, weights, words, halves, exact, sinks, block_tables, fields, exact_slots,
    q_stride, out_stride, table_stride, page_stride, exact_stride, layer, layer_stride, head_stride, packed, splits,
    scale_log2, cap_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, EXACT_KEYS: tl.constexpr, LEAST_SHARE: tl.constexpr, PACKED_PAD: tl.constexpr,
    WHOLE: tl.constexpr, EXACT_LAYER: tl.constexpr, EXACT_VALUES: tl.constexpr, EXACT_HEAD: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # heads fastest: programs that run together read neighbouring parts of the same pages
    kv_head, split, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table_row = tl.load(fields + span * 4)
    first_row = tl.load(fields + span * 4 + 1)
    rows = tl.load(fields + span * 4 + 2)
    context = tl.load(fields + span * 4 + 3)
    first = first_seen(context, rows, WINDOW)
    walked = first // KEYS * KEYS
    share = share_of(context - walked, splits, KEYS, LEAST_SHARE)
    begin = walked + split * share
    end = tl.minimum(begin + share, context)
    if (begin >= end) & (split > 0):
        return

    slot = tl.arange(0, PACKED_PAD)
    row = slot // GROUP
    asked = row < rows
    first_position = tl.maximum(context - rows, 0)
    last = first_position + row  # the row's position; rows past the span's attend to no less
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    head = kv_head * GROUP + slot % GROUP
    query_row = (first_row + row).to(tl.int64)
    # q: row, head, d
    q_at = q + (query_row * q_stride + head * DIM)[:, None] + d[None, :]
    query = tl.load(q_at, mask=asked[:, None] & inside[None, :], other=0.0)
    best = tl.full([PACKED_PAD], float("-inf"), tl.float32)
    total = tl.zeros([PACKED_PAD], tl.float32)
    acc = tl.zeros([PACKED_PAD, DIM_PAD], tl.float32)
    # exact K of this layer and head in page 0
    exact_base = exact + layer.to(tl.int64) * EXACT_LAYER + kv_head * EXACT_HEAD
    acc, best, total = walk_exact(
        acc, best, total, query, exact_base, exact_slots + first_row, last, first_position, d, inside,
        tl.where(end == context, first_position // 16 * 16, context), context, exact_stride,
        scale_log2, cap_log2,
        DIM, EXACT_VALUES, EXACT_KEYS, WINDOW, CAPPED,
    )  # fmt: skip
    # words of this layer and head in page 0
    head_at = layer.to(tl.int64) * layer_stride + kv_head * head_stride
    table = block_tables + table_row.to(tl.int64) * table_stride
    acc, best, total = walk_stored(
        acc, best, total, query, words, halves, head_at, table, last, first,
        begin, tl.minimum(end, tl.maximum(context - 1, 0) // 16 * 16), page_stride, scale_log2, cap_log2,
        DIM, DIM_PAD, WIDTH, KEYS, WINDOW, CAPPED,
    )  # fmt: skip
    if HAS_SINKS and WHOLE:
        acc, total = with_sink(acc, best, total, tl.load(sinks + head, mask=asked, other=0.0))
    # out: row, head, d
    out_at = out + (query_row * out_stride + head * DIM)[:, None] + d[None, :]
    # parts: span, kv head, slot, split
    part = ((span * KV_HEADS + kv_head).to(tl.int64) * packed + slot) * splits + split
    store_share(out_at, partials, weights, part, acc, best, total, asked, d, inside, DIM, WHOLE)
