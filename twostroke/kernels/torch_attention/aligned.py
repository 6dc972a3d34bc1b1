"""torch's fused attention, called in the same way for a position, whatever chunk the position is in.

Query rows are computed in tiles that begin at fixed positions of their sequence, over a context that ends with the
tile. Rows that are not in the step are padding, and so are keys that are not known yet: a mask hides both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, rules_of
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.torch_attention.gathered import TorchAttentionStep

TILE: Final = 16
"""Positions of a tile. A decoding row costs as much as all of them, and a prompt takes one call per tile."""


@dataclass(frozen=True, slots=True, eq=False)
class AlignedSpan:
    """The query rows of one sequence in a step, at positions first .. end - 1. `end` is the length of its context."""

    block_table: torch.Tensor
    rows: slice
    first: int
    end: int


class AlignedAttention:
    """Attention whose result for a row is a function of its position, its query and the keys and values that it attends
    to."""

    def __init__(self, pool: PagePool, heads: int, rules: AnyRules) -> None:
        self.pool = pool
        self.heads = heads
        self.rules = rules_of(rules, pool.layers)

    def begin(self, batch: RaggedBatch) -> TorchAttentionStep[AlignedSpan]:
        return TorchAttentionStep(self, batch, [_span_of(batch, sequence) for sequence in range(batch.sequences)])

    def attend_span(
        self, layer: int, span: AlignedSpan, q: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Writes the attention of one span's rows of q [T, heads, D] into out [T, heads, value_dim]."""
        rule, aligned_end = self.rules[layer], -(-span.end // TILE) * TILE
        first_seen = rule.first_visible(span.first)
        k, v = (
            functional.pad(each, (0, 0, 0, aligned_end - span.end))
            for each in reference.gather_kv(self.pool, layer, span.block_table, span.end, q.dtype, first_seen)
        )
        for start in range(span.first // TILE * TILE, span.end, TILE):
            stop = start + TILE
            first, end = max(start, span.first), min(stop, span.end)
            rows = slice(span.rows.start + first - span.first, span.rows.start + end - span.first)
            query = functional.pad(q[rows], (0, 0, 0, 0, first - start, stop - end))
            seen = reference.visible(torch.arange(start, stop), torch.arange(stop), rule)
            answer = reference.attention(query, k[:, :stop], v[:, :stop], seen, rule, sinks)
            out[rows] = answer[first - start : end - start]


def _span_of(batch: RaggedBatch, sequence: int) -> AlignedSpan:
    rows = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
    end = batch.context_lens[sequence]
    return AlignedSpan(batch.block_tables[sequence], rows, end - (rows.stop - rows.start), end)
