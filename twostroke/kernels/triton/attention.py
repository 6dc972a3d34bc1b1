"""Attention over pages on a CUDA device. It chooses a kernel for each span.

Short spans are those of one row, and those whose packed heads still fit, such as the tail of a prompt. They read the
cache in place, and their context is split among programs. Longer spans are prefill. A step of any mix is at most three
launches per layer, plus the merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from twostroke.base.errors import ConfigError
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, AttentionRule, rules_of
from twostroke.kernels.attention.spans import FIELDS, Spans, TokenSlots, cut_into_tiles, spans_by_length, spans_on
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.triton.checks import WIDEST_HEAD, check_pool
from twostroke.kernels.triton.decode import (
    HOPPER_SHARED_BYTES,
    MOST_PACKED,
    DecodePlan,
    DecodeTuning,
    decode_attention,
    decode_tuning,
    plan_decode,
)
from twostroke.kernels.triton.prefill import PrefillTuning, prefill_attention, prefill_tuning
from twostroke.kernels.triton.store import rotate_and_store

INTERPRETED_MULTIPROCESSORS: Final = 1
"""The number of multiprocessors without a device: the interpreter runs one program after the other."""

LIKE_HOPPER: Final = (9, 10)
"""Major compute capabilities with as much shared memory per program as Hopper."""
LEAST_SHARED_BYTES: Final = 99 * 1024
"""Bytes of shared memory that all devices since 8.0 have."""


class TritonAttention:
    """Attention over a pool, on the pool's device. `dtype` is that of the pool's numbers by default.

    `has_sinks` says whether layers pass sinks to `attend`.
    """

    def __init__(
        self,
        pool: PagePool,
        heads: int,
        rules: AnyRules,
        dtype: torch.dtype | None = None,
        *,
        has_sinks: bool = False,
        decode: DecodeTuning | None = None,
        prefill: PrefillTuning | None = None,
    ) -> None:
        kv_heads, dim = pool.kv_heads, pool.head_dim
        if dim % 8 or dim > WIDEST_HEAD:
            raise ConfigError(f"heads of {dim} values: CUDA attention needs a multiple of 8, at most {WIDEST_HEAD}")
        if heads % kv_heads:
            raise ConfigError(f"{heads} query heads cannot share {kv_heads} K/V heads evenly")
        self.pool = pool
        self.dtype = dtype or pool.numbers.dtype
        """The dtype of queries, keys and values."""
        self.heads = heads
        self.rules = rules_of(rules, pool.layers)
        self.has_sinks = has_sinks
        shared = shared_bytes_of(pool.device)
        self.decode = decode or decode_tuning(dim, self.dtype, shared)
        self.prefill = prefill or prefill_tuning(dim, self.dtype, shared)
        self.short_rows = max(1, MOST_PACKED // (heads // kv_heads))
        """Most query rows of a short span. Longer spans are prefill."""
        self.multiprocessors = multiprocessors_of(pool.device)

    def begin(self, batch: RaggedBatch) -> TritonStep:
        """Returns a step of any mix of spans. The host plans it, copies the plan to the device once, and does not wait
        for the device."""
        single, short, long = spans_by_length(batch, self.short_rows)
        tiles = cut_into_tiles(long, self.prefill.rows)
        *decodes, prefill = spans_on(self.pool.device, [single, short, tiles], batch.block_tables)
        plans = tuple(self.plan(spans) for spans in decodes if spans is not None)
        return TritonStep(self, TokenSlots(batch.write_slots, batch.cosines, batch.sines), plans, prefill)

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> TritonStep:
        """Returns a step of spans of at most `short_rows` rows over tensors that are rewritten in place before each
        replay.

        A CUDA graph captures it: keep the step as long as the graph, which uses its workspace. A span that pads the
        batch has one row and a context of 0; its output is 0, and its token's slot must be in a page that is not read.
        """
        assert spans.most_rows <= self.short_rows, f"{spans.most_rows} rows per span are prefill"
        return TritonStep(self, placement, (self.plan(spans),), None)

    def plan(self, spans: Spans) -> Decode:
        return planned(spans, self.pool, self.heads, self.multiprocessors, self.decode, self.rules)

    def warm_up(self) -> None:
        """Compiles every kernel that a step can need. None of them runs, since an empty launch only compiles."""
        pool = self.pool
        kv_heads, block, dim = pool.kv_heads, pool.block, pool.head_dim
        widest = -(-2 * self.decode.least_share // block)
        nothing = torch.empty(0, FIELDS, dtype=torch.int32, device=pool.device)
        tables = torch.zeros(1, widest, dtype=torch.int32, device=pool.device)
        q = torch.empty(0, self.heads, dim, dtype=self.dtype, device=pool.device)
        slots, layers = torch.empty(0, dtype=torch.int64, device=pool.device), distinct_layers(self.rules)
        angles = torch.empty(0, (1 + max(rule.rope for rule in self.rules)) * dim // 2, device=pool.device)
        sinks = torch.zeros(self.heads, device=pool.device) if self.has_sinks else None
        tile = Spans(nothing, tables, self.prefill.rows, 1)
        with torch.cuda.device_of(pool.numbers):
            for layer in layers:
                placement, rope = TokenSlots(slots, angles, angles), self.rules[layer].rope
                rotate_and_store(q, q[:, :kv_heads], q[:, :kv_heads], pool, layer, placement, rope)
                prefill_attention(q, pool, layer, tile, self.rules, q, self.prefill, sinks)
            for rows in warm_up_rows(self.short_rows):
                for longest in (self.decode.least_share, 2 * self.decode.least_share):  # whole, split
                    spans = Spans(nothing, tables, rows, longest)
                    plan = plan_decode(spans, pool, self.heads, max(2, self.multiprocessors), self.decode)
                    for layer in layers:
                        decode_attention(q, pool, layer, spans, self.rules, q, plan, sinks)


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """The plan of one launch over spans of few rows."""

    spans: Spans
    plans: Mapping[int | None, DecodePlan]
    """One plan for all layers with the same sight."""

    def plan_of(self, rule: AttentionRule) -> DecodePlan:
        return self.plans[rule.sight]


def planned(
    spans: Spans,
    pool: PagePool,
    heads: int,
    multiprocessors: int,
    tuning: DecodeTuning,
    rules: Sequence[AttentionRule],
) -> Decode:
    """Returns the launch with a plan for each sight of layers."""
    kinds = {rule.sight: rule for rule in rules}
    return Decode(
        spans, {sight: plan_decode(spans, pool, heads, multiprocessors, tuning, rule) for sight, rule in kinds.items()}
    )


def distinct_layers(rules: Sequence[AttentionRule]) -> list[int]:
    """Returns one layer for each kind of layers that kernels are compiled for. Layers that differ only in scale are one
    kind."""
    kinds = [replace(rule, scale=1.0) for rule in rules]
    return [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]


def warm_up_rows(short_rows: int) -> set[int]:
    """Returns the numbers of query rows that need separate kernels."""
    return {short_rows, *(1 << power for power in range(short_rows.bit_length()))}


class TritonStep:
    """Attention of one step, layer by layer."""

    def __init__(
        self, backend: TritonAttention, placement: TokenSlots, decodes: tuple[Decode, ...], prefill: Spans | None
    ) -> None:
        self._backend = backend
        self._placement = placement
        self._decodes = decodes
        self._prefill = prefill

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        return rotate_and_store(q, k, v, backend.pool, layer, self._placement, backend.rules[layer].rope)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        backend = self._backend
        check_pool(backend.pool, layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for decode in self._decodes:
            plan = decode.plan_of(backend.rules[layer])
            decode_attention(q, backend.pool, layer, decode.spans, backend.rules, out, plan, sinks)
        if self._prefill is not None:
            prefill_attention(q, backend.pool, layer, self._prefill, backend.rules, out, backend.prefill, sinks)
        return out.flatten(1)


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes_of(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program can count on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in LIKE_HOPPER:
        return LEAST_SHARED_BYTES
    return HOPPER_SHARED_BYTES
