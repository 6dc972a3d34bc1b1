"""The oracle: rope, page writes and paged attention in plain torch, one sequence at a time, nothing clever."""

from __future__ import annotations

import torch

from twostroke.kernels.attention import RaggedBatch
from twostroke.kernels.page_pool import PagePool
from twostroke.kernels.spans import Spans, TokenSlots


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rope on x [T, heads, D] with cosines and sines [T, D / 2], in float32, back in x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(x.dtype)


def gather_kv(
    pool: PagePool, layer: int, block_table: torch.Tensor, context_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of one sequence's K and V, each [kv_heads, context, D], in `dtype`."""
    blocks = -(-context_len // pool.block)
    pages = pool.read(block_table[:blocks].long(), layer)
    k, v = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context_len].to(dtype)
    return k, v


def paged_attention(q: torch.Tensor, pool: PagePool, layer: int, batch: RaggedBatch, scale: float) -> torch.Tensor:
    """[T, heads, D]: softmax(q k * scale) v in float32 over each sequence's pages, causal by position."""
    out = torch.empty_like(q)
    groups = q.shape[1] // pool.kv_heads
    for sequence, context_len in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
        k, v = (
            x.repeat_interleave(groups, dim=0)
            for x in gather_kv(pool, layer, batch.block_tables[sequence], context_len, torch.float32)
        )
        scores = torch.einsum("thd,hcd->htc", q[rows].float(), k) * scale
        future = torch.arange(context_len) > batch.positions[rows, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("htc,hcd->thd", weights, v).to(q.dtype)
    return out


def rotate_and_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: PagePool, layer: int, placement: TokenSlots
) -> torch.Tensor:
    """Write the rotated k, and v, into the pool's slots; return the rotated q."""
    pool.write(rotate(k, placement.cosines, placement.sines), v, layer, placement.write_slots)
    return rotate(q, placement.cosines, placement.sines)


def span_attention(
    q: torch.Tensor, pool: PagePool, layer: int, spans: Spans, scale: float, out: torch.Tensor, plan: object = None
) -> None:
    """Attention of the spans' rows of q [T, heads, D] into the same rows of out. Any cut into spans gives the same."""
    for sequence, first, rows, context in spans.fields.tolist():
        positions = torch.arange(context - rows, context, dtype=torch.int32)
        batch = RaggedBatch(
            positions=positions,
            query_starts=(0, rows),
            context_lens=(context,),
            block_tables=spans.block_tables[sequence, None],
            write_slots=positions.long(),
            cosines=positions,
            sines=positions,
        )
        out[first : first + rows] = paged_attention(q[first : first + rows], pool, layer, batch, scale)


def gather_pages(pool: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[i] = pool[pages[i]]."""
    torch.index_select(pool, 0, pages, out=buffer)


def scatter_pages(buffer: torch.Tensor, pages: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[pages[i]] = buffer[i]; pages must differ."""
    pool[pages] = buffer
