"""The backend over 4-bit pages on a CUDA device. It chooses the launch of the one attention kernel for each span.

The host assigns an exact page to each unfinished block (`ExactSlots`), and each token's slot in it comes with the step.
A step of any mix is at most five launches per layer, plus the merges.
"""

from __future__ import annotations

from typing import Final

import torch

from twostroke.base.errors import ConfigError
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, rules_of
from twostroke.kernels.attention.spans import FIELDS, Spans, TokenSlots, cut_into_tiles, spans_by_length, spans_on
from twostroke.kernels.page_forms.nibble_pool import NibblePool
from twostroke.kernels.triton.attention import (
    Decode,
    distinct_layers,
    multiprocessors_of,
    planned,
    shared_bytes_of,
    warm_up_rows,
)
from twostroke.kernels.triton.decode import MOST_PACKED, DecodeTuning, decode_tuning
from twostroke.kernels.triton.page_forms.nibble_spans import nibble_attention
from twostroke.kernels.triton.page_forms.nibbles import rotate_and_store_blocks

WHOLE: Final = 0
"""A number of multiprocessors for which no context is split, because a prompt has many tiles."""


class TritonNibbleAttention:
    """Attention over pages on their device. Queries, keys and values have the dtype of the exact pages."""

    def __init__(
        self,
        pool: NibblePool,
        heads: int,
        rules: AnyRules,
        *,
        has_sinks: bool = False,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """Raises ConfigError for query heads that cannot share the pool's K/V heads."""
        if heads % pool.kv_heads:
            raise ConfigError(f"{heads} query heads cannot share {pool.kv_heads} K/V heads evenly")
        self.pool = pool
        self.heads = heads
        self.rules = rules_of(rules, pool.exact.pool.layers)
        self.has_sinks = has_sinks
        self.dtype = pool.exact.pool.numbers.dtype
        self.tuning = tuning or decode_tuning(pool.head_dim, self.dtype, shared_bytes_of(pool.device))
        self.short_rows = max(1, MOST_PACKED // (heads // pool.kv_heads))
        """Most query rows of a program. A longer span is cut into tiles of this many rows."""
        self.multiprocessors = multiprocessors_of(pool.device)

    def begin(self, batch: RaggedBatch) -> TritonNibbleStep:
        """Returns a step of any mix of spans. The host plans it, copies the plan to the device once, and does not wait
        for the device."""
        single, short, long = spans_by_length(batch, self.short_rows)
        groups = spans_on(self.pool.device, [single, short, cut_into_tiles(long, self.short_rows)], batch.block_tables)
        plans = [
            self.plan(spans, multiprocessors)
            for spans, multiprocessors in zip(groups, (self.multiprocessors, self.multiprocessors, WHOLE), strict=True)
            if spans is not None
        ]
        placement = TokenSlots(batch.write_slots, batch.cosines, batch.sines, batch.exact_slots)
        return TritonNibbleStep(self, placement, tuple(plans))

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> TritonNibbleStep:
        """Returns a step of spans of at most `short_rows` rows over tensors that are rewritten in place before each
        replay.

        A CUDA graph captures it: keep the step as long as the graph, which uses its workspace. A span that pads the
        batch has one row. Its slots lie in pages that are not read.
        """
        assert spans.most_rows <= self.short_rows, f"{spans.most_rows} rows per span are prefill"
        return TritonNibbleStep(self, placement, (self.plan(spans, self.multiprocessors),))

    def plan(self, spans: Spans, multiprocessors: int) -> Decode:
        return planned(spans, self.pool.exact.pool, self.heads, multiprocessors, self.tuning, self.rules)

    def warm_up(self) -> None:
        """Compiles every kernel that a step can need. None of them runs, since an empty launch only compiles."""
        pool, tuning = self.pool, self.tuning
        nothing = torch.empty(0, FIELDS, dtype=torch.int32, device=pool.device)
        tables = torch.zeros(1, -(-2 * tuning.least_share // pool.block), dtype=torch.int32, device=pool.device)
        q = torch.empty(0, self.heads, pool.head_dim, dtype=self.dtype, device=pool.device)
        angles = torch.empty(0, (1 + max(rule.rope for rule in self.rules)) * pool.head_dim // 2, device=pool.device)
        slots, layers = torch.empty(0, dtype=torch.int64, device=pool.device), distinct_layers(self.rules)
        sinks = torch.zeros(self.heads, device=pool.device) if self.has_sinks else None
        with torch.cuda.device_of(pool.heads):
            placement = TokenSlots(slots, angles, angles, slots)
            step = TritonNibbleStep(self, placement, ())
            for layer in layers:
                step.store(layer, q, q[:, : pool.kv_heads], q[:, : pool.kv_heads])
            for rows in warm_up_rows(self.short_rows):
                for longest in (tuning.least_share, 2 * tuning.least_share):  # whole, split
                    plan = self.plan(Spans(nothing, tables, rows, longest), max(2, self.multiprocessors))
                    step = TritonNibbleStep(self, placement, (plan,))
                    for layer in layers:
                        step.attend(layer, q, sinks)


class TritonNibbleStep:
    """Attention of one step, layer by layer."""

    def __init__(self, backend: TritonNibbleAttention, placement: TokenSlots, groups: tuple[Decode, ...]) -> None:
        assert placement.exact_slots is not None, "tokens of 4-bit pages have exact slots"
        self._backend = backend
        self._placement = placement
        self._exact_slots = placement.exact_slots
        self._groups = groups

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        return rotate_and_store_blocks(q, k, v, backend.pool, layer, self._placement, backend.rules[layer].rope)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        backend = self._backend
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            plan = group.plan_of(backend.rules[layer])
            nibble_attention(q, backend.pool, layer, group.spans, self._exact_slots, backend.rules, out, plan, sinks)
        return out.flatten(1)
