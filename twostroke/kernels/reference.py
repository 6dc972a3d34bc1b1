"""The reference that tests compare kernels with: rope, page writes and paged attention in plain torch, one sequence at
a time."""

from __future__ import annotations

import torch
from torch.nn import functional

from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, AttentionRule, rule_of
from twostroke.kernels.attention.spans import Spans, TokenSlots
from twostroke.kernels.pools.page_pool import PagePool


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Applies rope to x [T, heads, D] with cosines and sines [T, D / 2], in float32. The result has x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(x.dtype)


def gather_kv(
    pool: PagePool, layer: int, block_table: torch.Tensor, context_len: int, dtype: torch.dtype, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns one sequence's K and V, [kv_heads, context, D] and [kv_heads, context, value_dim], in `dtype`.

    Blocks before that of the token `first` are zeros: no row attends to them, and their pages may be gone.
    """
    begin, end = first // pool.block, -(-context_len // pool.block)
    pages = pool.read(block_table[begin:end].long(), layer)
    stored = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : context_len - begin * pool.block].to(dtype)
    # stored: [2, kv_heads, tokens, head_dim] of K and V, or [1, ...] of latents, whose values are a part of the keys
    k, *values = functional.pad(stored, (0, 0, begin * pool.block, 0)) if begin else stored
    return k, values[0] if values else k[..., : pool.value_dim]


def visible(positions: torch.Tensor, keys: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Returns bool [T, context]: whether the token at each position attends to each key."""
    seen: torch.Tensor = rule.sees(positions[:, None], keys)
    return seen


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Returns scaled scores, or logits, with their soft cap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax_with(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns the softmax of scores [heads, T, context] and each head's sink, without the sinks."""
    if sinks is None:
        return scores.softmax(dim=-1)
    last = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat((scores, last), dim=-1).softmax(dim=-1)[..., :-1]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [T, heads, value_dim] of q [T, heads, D] over k [kv_heads, context, D] and v [kv_heads, context,
    value_dim].

    `seen` is [T, context], or None for all. `sinks`: float32 [heads], or None for none.
    """
    query = q.transpose(0, 1)
    if rule.softcap is None and sinks is None:
        answer = functional.scaled_dot_product_attention(
            query[None], k[None], v[None], attn_mask=seen, scale=rule.scale, enable_gqa=True
        )
        return answer[0].transpose(0, 1)
    groups = q.shape[1] // len(k)
    keys, values = (x.repeat_interleave(groups, dim=0) for x in (k, v))
    scores = capped((query @ keys.transpose(1, 2)).float() * rule.scale, rule.softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return (softmax_with(scores, sinks).to(v.dtype) @ values).transpose(0, 1)


def paged_attention(
    q: torch.Tensor,
    pool: PagePool,
    layer: int,
    batch: RaggedBatch,
    rules: AnyRules,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [T, heads, value_dim]: softmax(q k * scale) v in float32 over each sequence's pages, by the
    layer's rule.
    """
    out, rule = q.new_empty(*q.shape[:2], pool.value_dim), rule_of(rules, layer)
    groups = q.shape[1] // pool.kv_heads
    for sequence, context_len in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
        first = rule.first_visible(context_len - (rows.stop - rows.start))
        k, v = (
            x.repeat_interleave(groups, dim=0)
            for x in gather_kv(pool, layer, batch.block_tables[sequence], context_len, torch.float32, first)
        )
        scores = capped(torch.einsum("thd,hcd->htc", q[rows].float(), k) * rule.scale, rule.softcap)
        seen = visible(batch.positions[rows], torch.arange(context_len), rule)
        weights = softmax_with(scores.masked_fill(~seen, float("-inf")), sinks)
        out[rows] = torch.einsum("htc,hcd->thd", weights, v).to(q.dtype)
    return out


def rotate_end(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Applies rope to the last dimensions of x [T, heads, D], two for each cosine."""
    rope_dim = 2 * cosines.shape[-1]
    if rope_dim == x.shape[-1]:
        return rotate(x, cosines, sines)
    return torch.cat((x[..., :-rope_dim], rotate(x[..., -rope_dim:], cosines, sines)), dim=-1)


def rotate_and_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: PagePool, layer: int, placement: TokenSlots, rope: int = 0
) -> torch.Tensor:
    """Writes v, and k rotated with one of the ropes, into the pool's slots. Returns the rotated q."""
    columns = slice(rope * pool.rope_dim // 2, (rope + 1) * pool.rope_dim // 2)
    cosines, sines = placement.cosines[:, columns], placement.sines[:, columns]
    pool.write(rotate_end(k, cosines, sines), v, layer, placement.write_slots)
    return rotate_end(q, cosines, sines)


def span_attention(
    q: torch.Tensor,
    pool: PagePool,
    layer: int,
    spans: Spans,
    rules: AnyRules,
    out: torch.Tensor,
    plan: object = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Writes attention of the spans' rows of q [T, heads, D] into the same rows of out.

    The result does not depend on how the rows are cut into spans.
    """
    for sequence, first, rows, context in spans.fields.tolist():
        positions = torch.arange(context - rows, context, dtype=torch.int32)
        batch = RaggedBatch(
            positions=positions,
            query_starts=(0, rows),
            context_lens=(context,),
            block_tables=spans.block_tables[sequence, None],
            write_slots=positions.long(),
            cosines=positions,  # not used: the rows are rotated already
            sines=positions,
        )
        out[first : first + rows] = paged_attention(q[first : first + rows], pool, layer, batch, rules, sinks)
