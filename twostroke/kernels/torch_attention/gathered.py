"""Attention through torch's own fused kernel: each sequence's context is gathered once per layer.

It suits prefill, where the gather costs little compared with the arithmetic. In decode it copies the cache every step,
so it is only used where no native kernel can be built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import torch

from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, AttentionRule, rules_of
from twostroke.kernels.pools.page_pool import PagePool

TILE_ROWS: Final = 128
"""Query rows per call. A tile skips the keys after its last row; for a whole chunk they would be computed and masked.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    rows: slice
    context_len: int
    """Number of tokens that the tile's last row attends to."""
    positions: torch.Tensor
    """int32 [rows]"""
    masks: dict[int | None, tuple[int, torch.Tensor | None]]
    """For each sight of rules: the first key that any row attends to, and bool [rows, keys] of the keys from it on that
    each row attends to. The latter is None where all rows attend to all of them."""

    def keys(self, rule: AttentionRule) -> tuple[slice, torch.Tensor | None]:
        """Returns the range of keys that any row attends to, and the mask of those that each row attends to."""
        if rule.sight not in self.masks:
            first = rule.first_visible(self.context_len - (self.rows.stop - self.rows.start))
            mask = None
            if self.rows.stop - self.rows.start > 1:
                keys = torch.arange(first, self.context_len, dtype=torch.int32)
                mask = reference.visible(self.positions, keys, rule)
            self.masks[rule.sight] = first, mask
        first, mask = self.masks[rule.sight]
        return slice(first, self.context_len), mask


@dataclass(frozen=True, slots=True, eq=False)
class QuerySpan:
    """The query rows of one sequence, and their context."""

    block_table: torch.Tensor
    context_len: int
    rows: int
    tiles: tuple[Tile, ...]


SpanKind_contra = TypeVar("SpanKind_contra", contravariant=True)


class SpanAttention(Protocol[SpanKind_contra]):
    """Attention span by span. Each kind of attention has its own class of spans."""

    pool: PagePool
    rules: tuple[AttentionRule, ...]

    def attend_span(
        self, layer: int, span: SpanKind_contra, q: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None: ...


class TorchAttention:
    """Attention through scaled_dot_product_attention, one sequence after the other."""

    def __init__(self, pool: PagePool, heads: int, rules: AnyRules) -> None:
        self.pool = pool
        self.heads = heads
        self.rules = rules_of(rules, pool.layers)

    def begin(self, batch: RaggedBatch) -> TorchAttentionStep[QuerySpan]:
        spans = [span_of(batch, sequence) for sequence in range(batch.sequences)]
        return TorchAttentionStep(self, batch, spans)

    def attend_span(
        self, layer: int, span: QuerySpan, q: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Writes the attention of one span's rows of q [T, heads, D] into out [T, heads, value_dim]."""
        rule = self.rules[layer]
        first = rule.first_visible(span.context_len - span.rows)
        k, v = reference.gather_kv(self.pool, layer, span.block_table, span.context_len, q.dtype, first)
        for tile in span.tiles:
            keys, seen = tile.keys(rule)
            out[tile.rows] = reference.attention(q[tile.rows], k[:, keys], v[:, keys], seen, rule, sinks)


AnySpan = TypeVar("AnySpan")


class TorchAttentionStep(Generic[AnySpan]):
    def __init__(self, backend: SpanAttention[AnySpan], batch: RaggedBatch, spans: Sequence[AnySpan]) -> None:
        self._backend = backend
        self._batch = batch
        self._spans = spans

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, backend = self._batch, self._backend
        angles = batch.angles(backend.rules[layer].rope, backend.pool.rope_dim)
        backend.pool.write(reference.rotate_end(k, *angles), v, layer, batch.write_slots)
        return reference.rotate_end(q, *angles)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], self._backend.pool.value_dim)
        for span in self._spans:
            self._backend.attend_span(layer, span, q, sinks, out)
        return out.flatten(1)


def span_of(batch: RaggedBatch, sequence: int) -> QuerySpan:
    start, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
    context_len = batch.context_lens[sequence]
    tiles = []
    for first in range(start, end, TILE_ROWS):
        rows = slice(first, min(first + TILE_ROWS, end))
        tiles.append(Tile(rows, context_len - (end - rows.stop), batch.positions[rows], {}))
    return QuerySpan(batch.block_tables[sequence], context_len, end - start, tuple(tiles))
