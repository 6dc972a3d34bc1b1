"""Attention over pages of 4-bit numbers in plain torch. It runs where no native kernel can be built, and tests compare
native kernels with it.

A row attends to its own block's exact numbers, and to the stored ones of the blocks before it. Rows are computed in
tiles of one block, as in `aligned_attention`, so that a row's result depends only on its position.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, AttentionRule, rules_of
from twostroke.kernels.page_forms.nibble_pool import NibblePool
from twostroke.kernels.pools.parted_pool import with_exact_slots
from twostroke.page_forms.int4 import BLOCK


class NibbleAttention:
    """Attention whose result for a row is a function of its position, its query and the keys and values that it attends
    to."""

    def __init__(self, pool: NibblePool, heads: int, rules: AnyRules) -> None:
        self.pool = pool
        self.heads = heads
        self.rules = rules_of(rules, pool.layers)

    def begin(self, batch: RaggedBatch) -> NibbleAttentionStep:
        return NibbleAttentionStep(self, batch)


class NibbleAttentionStep:
    def __init__(self, backend: NibbleAttention, batch: RaggedBatch) -> None:
        self._pool = backend.pool
        self._rules = backend.rules
        self._batch = batch
        with_slots = with_exact_slots(batch, backend.pool.exact)
        assert with_slots.exact_slots is not None
        self._slots = with_slots.exact_slots
        self._last = (batch.positions % BLOCK == BLOCK - 1).nonzero().flatten()

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, pool = self._batch, self._pool
        angles = batch.angles(self._rules[layer].rope, pool.head_dim)
        k = reference.rotate(k, *angles)
        pool.exact.pool.write(k, v, layer, self._slots)
        if len(self._last):
            full = pool.exact.pool.read(self._slots[self._last] // BLOCK, layer)
            pool.store(batch.write_slots[self._last] // BLOCK, layer, full)
        return reference.rotate(q, *angles)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        for sequence in range(self._batch.sequences):
            self._attend_sequence(layer, sequence, q, sinks, out)
        return out.flatten(1)

    def _attend_sequence(
        self, layer: int, sequence: int, q: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        batch, start = self._batch, self._batch.query_starts[sequence]
        end = batch.context_lens[sequence]
        first = end - (batch.query_starts[sequence + 1] - start)
        seen = self._rules[layer].first_visible(first) // BLOCK
        stored = self._pool.read(batch.block_tables[sequence, seen : (end - 1) // BLOCK].long(), layer)
        k, v = functional.pad(stored.permute(1, 2, 0, 3, 4).flatten(2, 3).to(q.dtype), (0, 0, seen * BLOCK, 0))
        for tile in range(first // BLOCK * BLOCK, end, BLOCK):
            top, bottom = max(tile, first), min(tile + BLOCK, end)
            rows = slice(start + top - first, start + bottom - first)
            own = self._pool.exact.pool.read(self._slots[rows.start, None] // BLOCK, layer)[0]
            query = functional.pad(q[rows], (0, 0, 0, 0, top - tile, tile + BLOCK - bottom))
            whole = _tile(self._rules[layer], query, k[:, :tile], v[:, :tile], own, sinks)
            out[rows] = whole[top - tile : bottom - tile]


def _tile(
    rule: AttentionRule,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Returns [block, heads, D] of a whole block's queries, over keys and values [kv_heads, before, D] and its own."""
    exact_k, exact_v = own.to(query.dtype).nan_to_num()  # the mask hides unwritten numbers only if finite
    before, end = k.shape[1], k.shape[1] + BLOCK
    seen = reference.visible(torch.arange(before, end), torch.arange(end), rule)
    return reference.attention(query, torch.cat((k, exact_k), dim=1), torch.cat((v, exact_v), dim=1), seen, rule, sinks)
