"""Attention of few query rows per span over long contexts, as in decode. It is bound by reading K and V.

All query heads that share a K/V head, times the span's rows, are packed into one matrix operand, so K and V are read
once. A context is split among programs. The host fixes their number; the device computes their shares from the context
length. So a captured launch can be used for any lengths. Programs with empty shares end at once. Each share's result is
normalised and kept with the logarithm (base 2) of its weight; the second kernel merges them. In a layer with a window,
only what rows attend to is split, and nothing before that is read. A head's sink is added once, when all shares are
merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.attention.rules import SEES_ALL, AnyRules, AttentionRule, rule_of
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
from twostroke.kernels.triton.rules import capped, first_seen, is_seen, rule_arguments, score_factors, with_sink

HOPPER_SHARED_BYTES: Final = 227 * 1024
"""Bytes of shared memory that one program may use on Hopper."""
MOST_PACKED: Final = 64
"""Most query rows times query heads per K/V head of one program. Beyond it, arithmetic takes longer than reading."""
MERGE_CHUNK: Final = 16
MOST_SPLITS: Final = 128


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    keys: int
    """Tokens of context per iteration."""
    warps: int
    stages: int
    least_share: int
    """Least tokens of a share: a program must be worth its launch."""
    programs_per_sm: int = 8
    """Programs that the host aims for: several waves, so that ragged contexts even out."""


def decode_tuning(head_dim: int, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED_BYTES) -> DecodeTuning:
    """Returns the tuning. On Hopper there are three programs per multiprocessor, each with one tile in use and one in
    flight. Other devices get what fits."""
    if dtype == torch.float32:
        return DecodeTuning(keys=32 if head_dim <= 128 else 16, warps=4, stages=2, least_share=128)
    if shared_bytes < HOPPER_SHARED_BYTES:
        return DecodeTuning(keys=32 if head_dim <= 128 else 16, warps=4, stages=3, least_share=128)
    if head_dim <= 64:
        return DecodeTuning(keys=128, warps=4, stages=3, least_share=256)
    if head_dim <= 128:
        return DecodeTuning(keys=64, warps=4, stages=3, least_share=128)
    return DecodeTuning(keys=32, warps=4, stages=3, least_share=128)


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How a launch splits its contexts, and the memory for shares until they are merged. All layers use it in turn."""

    tuning: DecodeTuning
    splits: int
    partials: torch.Tensor
    """float32 [spans, kv_heads, most_rows * group, splits, head_dim]"""
    weights: torch.Tensor
    """float32 [spans, kv_heads, most_rows * group, splits]"""


def plan_decode(
    spans: Spans,
    pool: PagePool,
    heads: int,
    multiprocessors: int,
    tuning: DecodeTuning,
    rule: AttentionRule = SEES_ALL,
) -> DecodePlan:
    """Returns the plan for the layers with this rule."""
    kv_heads, dim = pool.kv_heads, pool.head_dim
    count = len(spans.fields)
    wanted = -(-multiprocessors * tuning.programs_per_sm // max(1, count * kv_heads))
    # What rows attend to is rounded down to the start of a tile.
    longest = rule.most_seen(spans.longest_context, spans.most_rows + tuning.keys + 1)
    most = -(-longest // tuning.least_share)
    splits = max(1, min(wanted, most, MOST_SPLITS))
    kept = (count, kv_heads, spans.most_rows * (heads // kv_heads), splits if splits > 1 else 0)
    return DecodePlan(
        tuning=tuning,
        splits=splits,
        partials=torch.empty((*kept, dim), dtype=torch.float32, device=pool.device),
        weights=torch.empty(kept, dtype=torch.float32, device=pool.device),
    )


def decode_attention(
    q: torch.Tensor,
    pool: PagePool,
    layer: int,
    spans: Spans,
    rules: AnyRules,
    out: torch.Tensor,
    plan: DecodePlan,
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
    kv_heads, dim = pool.kv_heads, pool.head_dim
    group = q.shape[1] // kv_heads
    packed = spans.most_rows * group
    count, splits, tuning = len(spans.fields), plan.splits, plan.tuning
    assert plan.weights.shape[:3] == (count, kv_heads, packed), "the plan was made for other spans"
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "DIM_PAD": triton.next_power_of_2(dim)}
    rule = rule_of(rules, layer)
    kind = rule_arguments(rule, sinks)
    share = {"KEYS": tuning.keys, "LEAST_SHARE": tuning.least_share, "WINDOW": kind.pop("WINDOW")}
    decode_kernel[(kv_heads, splits, count)](
        q, out, plan.partials, plan.weights, pool.numbers, scales_of(pool), sinks_of(sinks, q),
        spans.block_tables, spans.fields,
        q.stride(0), out.stride(0), spans.block_tables.stride(0), pool.numbers.stride(0), layer, packed, splits,
        *score_factors(rule),
        **shape, **share, **kind, **pool_arguments(pool),
        PACKED_PAD=max(16, triton.next_power_of_2(packed)), WHOLE=splits == 1,
        num_warps=tuning.warps, num_stages=tuning.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(kv_heads, packed, count)](
            out, plan.partials, plan.weights, sinks_of(sinks, q), spans.fields, out.stride(0), packed, splits,
            **shape, **share, HAS_SINKS=kind["HAS_SINKS"], CHUNK=MERGE_CHUNK, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def share_of(seen, splits, KEYS: tl.constexpr, LEAST_SHARE: tl.constexpr):
    """Returns the tokens per program: an equal part of those that are seen, in whole tiles, but at least
    LEAST_SHARE."""
    return tl.maximum(tl.cdiv(tl.cdiv(seen, splits), KEYS) * KEYS, LEAST_SHARE)


@triton.jit
def weighed(best, total, scores):
    """Returns the weights of another tile's scores (base 2), the highest score so far, the sum of weights, and a
    factor.

    Weights are relative to the highest score. Sums relative to the previous highest score are multiplied by the factor.
    """
    higher = tl.maximum(best, tl.max(scores, 1))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)  # a row may have attended to nothing yet
    decay = tl.exp2(best - pivot)
    weight = tl.exp2(scores - pivot[:, None])
    return weight, higher, total * decay + tl.sum(weight, 1), decay


@triton.jit
def store_share(
    out_at, partials, weights, part, acc, best, total, asked, d, inside, DIM: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Writes a share into out if it is the whole context. Otherwise it writes it to `partials`, with the logarithm
    (base 2) of each row's weight."""
    divisor = tl.where(total > 0, total, 1.0)  # without a key, the result and its weight are 0
    acc = acc / divisor[:, None]
    mask = asked[:, None] & inside[None, :]
    if WHOLE:
        tl.store(out_at, acc.to(out_at.dtype.element_ty), mask=mask)
    else:
        # partials: part, d
        tl.store(partials + part[:, None] * DIM + d[None, :], acc, mask=mask)
        tl.store(weights + part, best + tl.log2(divisor), mask=asked)


@triton.jit
def walk_share(
    query, keys_base, scales_base, table, last, first, d, inside, begin, end, page_stride, scale_log2, cap_log2,
    VALUES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    PACKED_PAD: tl.constexpr, DIM_PAD: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Returns the sum of weighted values, the highest score (base 2) and the sum of weights of one share. V lies VALUES
    after K.

    Nothing before the position `first` is read.
    """
    best = tl.full([PACKED_PAD], float("-inf"), tl.float32)
    total = tl.zeros([PACKED_PAD], tl.float32)
    acc = tl.zeros([PACKED_PAD, DIM_PAD], tl.float32)
    # the page of each token of the first tile; pages are loaded one tile ahead
    at = begin + tl.arange(0, KEYS)
    page = tl.load(table + at // BLOCK, mask=at < end, other=0)
    for start in tl.range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        valid = at < end
        if WINDOW != 0:
            valid &= at >= first
        # K: page, offset in the block, d
        place = page.to(tl.int64) * page_stride
        key_at = keys_base + (place + (at % BLOCK) * DIM)[:, None] + d[None, :]
        # scales: page, offset in the block
        scale_at = scales_base + place // 4 + at % BLOCK
        mask = valid[:, None] & inside[None, :]
        # the page of each token of the next tile
        page = tl.load(table + (at + KEYS) // BLOCK, mask=at + KEYS < end, other=0)
        keys = decoded(tl.load(key_at, mask=mask, other=0), KIND).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale_log2
        if KIND != 0:
            scores *= tl.load(scale_at, mask=valid, other=0.0)[None, :]
        scores = tl.where(valid[None, :] & is_seen(at, last, WINDOW), capped(scores, cap_log2, CAPPED), float("-inf"))
        weight, best, total, decay = weighed(best, total, scores)
        # V: as K, all heads of K further
        values = decoded(tl.load(key_at + VALUES, mask=mask, other=0), KIND)
        if KIND != 0:
            values *= tl.load(scale_at + VALUES // 4, mask=valid, other=0.0)[:, None]
        values = values.to(query.dtype)
        acc = tl.dot(weight.to(values.dtype), values, acc * decay[:, None], input_precision="tf32x3")
    return acc, best, total


@triton.jit(
    do_not_specialize=["layer", "packed", "splits", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "fields"],
)
def decode_kernel(
    q, out, partials, weights, pool, scales, sinks, block_tables, fields,
    q_stride, out_stride, table_stride, page_stride, layer, packed, splits,
    scale_log2, cap_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KEYS: tl.constexpr, LEAST_SHARE: tl.constexpr, PACKED_PAD: tl.constexpr, WHOLE: tl.constexpr,
    LAYER: tl.constexpr, VALUES: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
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
    last = context - rows + row  # the last position that the row attends to
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    head = kv_head * GROUP + slot % GROUP
    query_row = (first_row + row).to(tl.int64)
    # q: row, head, d
    q_at = q + (query_row * q_stride + head * DIM)[:, None] + d[None, :]
    query = tl.load(q_at, mask=asked[:, None] & inside[None, :], other=0.0)
    # K of this layer and head in page 0; V lies VALUES after K
    head_at = layer.to(tl.int64) * LAYER + kv_head * HEAD
    keys_base, scales_base = pool + head_at, scales + head_at // 4
    table = block_tables + table_row.to(tl.int64) * table_stride
    acc, best, total = walk_share(
        query, keys_base, scales_base, table, last, first, d, inside, begin, end, page_stride, scale_log2, cap_log2,
        VALUES, DIM, BLOCK, KEYS, PACKED_PAD, DIM_PAD, KIND, WINDOW, CAPPED,
    )  # fmt: skip
    if HAS_SINKS and WHOLE:
        acc, total = with_sink(acc, best, total, tl.load(sinks + head, mask=asked, other=0.0))
    # out: row, head, d
    out_at = out + (query_row * out_stride + head * DIM)[:, None] + d[None, :]
    # parts: span, kv head, slot, split
    part = ((span * KV_HEADS + kv_head).to(tl.int64) * packed + slot) * splits + split
    store_share(out_at, partials, weights, part, acc, best, total, asked, d, inside, DIM, WHOLE)


@triton.jit(do_not_specialize=["packed", "splits"], do_not_specialize_on_alignment=["fields"])
def merge_kernel(
    out, partials, weights, sinks, fields, out_stride, packed, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KEYS: tl.constexpr, LEAST_SHARE: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    kv_head, slot, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(fields + span * 4 + 1)
    rows = tl.load(fields + span * 4 + 2)
    context = tl.load(fields + span * 4 + 3)
    row = slot // GROUP
    if row >= rows:
        return

    seen = context - first_seen(context, rows, WINDOW) // KEYS * KEYS
    used = tl.maximum(tl.cdiv(seen, share_of(seen, splits, KEYS, LEAST_SHARE)), 1)
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_PAD], tl.float32)
    first = ((span * KV_HEADS + kv_head).to(tl.int64) * packed + slot) * splits
    for start in tl.range(0, used, CHUNK):
        split = start + tl.arange(0, CHUNK)
        valid = split < used
        # weights: one per share
        logarithm = tl.load(weights + first + split, mask=valid, other=float("-inf"))
        higher = tl.maximum(best, tl.max(logarithm, 0))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(best - pivot)
        weight = tl.exp2(logarithm - pivot)
        # partials: share, d
        part_at = partials + (first + split)[:, None] * DIM + d[None, :]
        part = tl.load(part_at, mask=valid[:, None] & inside[None, :], other=0.0)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        best = higher
    head = kv_head * GROUP + slot % GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        pivot = tl.maximum(best, sink)
        acc *= tl.exp2(best - pivot)
        total = total * tl.exp2(best - pivot) + tl.exp2(sink - pivot)
    acc = acc / tl.where(total > 0, total, 1.0)
    # out: row, head, d
    out_at = out + (first_row + row).to(tl.int64) * out_stride + head * DIM + d
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside)
