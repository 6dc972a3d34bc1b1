"""Attention through torch's own fused kernel: each sequence's context is gathered once per layer.

Right for prefill, where the gather is small beside the arithmetic. For decode it copies the cache every step: there it
only serves where no native kernel can be built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch.nn import functional

from twostroke.kernels import reference
from twostroke.kernels.attention import RaggedBatch
from twostroke.kernels.page_pool import PagePool

TILE_ROWS: Final = 128
"""Query rows per call: a tile skips the keys after its last row, which a whole chunk would compute and mask."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    rows: slice
    context_len: int
    """Tokens that the tile's last row attends to."""
    mask: torch.Tensor | None
    """bool [query, context]; None where one row asks, which sees everything."""


@dataclass(frozen=True, slots=True, eq=False)
class QuerySpan:
    """The query rows of one sequence, and what they may see."""

    block_table: torch.Tensor
    context_len: int
    tiles: tuple[Tile, ...]


SpanKind_contra = TypeVar("SpanKind_contra", contravariant=True)


class SpanAttention(Protocol[SpanKind_contra]):
    """Attention span by span, each described as its kind wants it."""

    pool: PagePool

    def attend_span(self, layer: int, span: SpanKind_contra, q: torch.Tensor, out: torch.Tensor) -> None: ...


class TorchAttention:
    """One sequence after the other through scaled_dot_product_attention."""

    def __init__(self, pool: PagePool, heads: int, scale: float) -> None:
        self.pool = pool
        self.heads = heads
        self.scale = scale

    def begin(self, batch: RaggedBatch) -> TorchAttentionStep[QuerySpan]:
        spans = [span_of(batch, sequence) for sequence in range(batch.sequences)]
        return TorchAttentionStep(self, batch, spans)

    def attend_span(self, layer: int, span: QuerySpan, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of one span's rows of q [T, heads, D] into out [T, heads, D]."""
        k, v = reference.gather_kv(self.pool, layer, span.block_table, span.context_len, q.dtype)
        for tile in span.tiles:
            answer = functional.scaled_dot_product_attention(
                q[tile.rows].transpose(0, 1)[None],
                k[None, :, : tile.context_len],
                v[None, :, : tile.context_len],
                attn_mask=tile.mask,
                scale=self.scale,
                enable_gqa=True,
            )
            out[tile.rows] = answer[0].transpose(0, 1)


AnySpan = TypeVar("AnySpan")


class TorchAttentionStep(Generic[AnySpan]):
    def __init__(self, backend: SpanAttention[AnySpan], batch: RaggedBatch, spans: Sequence[AnySpan]) -> None:
        self._backend = backend
        self._batch = batch
        self._spans = spans

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        k = reference.rotate(k, batch.cosines, batch.sines)
        self._backend.pool.write(k, v, layer, batch.write_slots)
        return reference.rotate(q, batch.cosines, batch.sines)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        for span in self._spans:
            self._backend.attend_span(layer, span, q, out)
        return out.flatten(1)


def span_of(batch: RaggedBatch, sequence: int) -> QuerySpan:
    start, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
    context_len = batch.context_lens[sequence]
    tiles = []
    for first in range(start, end, TILE_ROWS):
        rows = slice(first, min(first + TILE_ROWS, end))
        visible = context_len - (end - rows.stop)
        mask = None
        if rows.stop - rows.start > 1:
            mask = torch.arange(visible, dtype=torch.int32) <= batch.positions[rows, None]
        tiles.append(Tile(rows, visible, mask))
    return QuerySpan(batch.block_tables[sequence], context_len, tuple(tiles))
