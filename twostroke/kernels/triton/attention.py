"""Attention over pages on a CUDA device: which span goes to which kernel.

Spans of one row, and short spans whose packed heads still fit (the tail of a prompt), read the cache in place with the
context split among programs; longer spans are prefill. A step of any mix is at most three launches per layer, plus the
merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from twostroke.errors import ConfigError
from twostroke.kernels.attention import RaggedBatch
from twostroke.kernels.page_pool import PagePool
from twostroke.kernels.spans import FIELDS, Spans, TokenSlots, cut_into_tiles, spans_by_length, spans_on
from twostroke.kernels.triton.checks import WIDEST_HEAD
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
"""The count without a device to ask: kernels run one program after the other."""

LIKE_HOPPER: Final = (9, 10)
"""Major compute capabilities with as much shared memory per program."""
LEAST_SHARED_BYTES: Final = 99 * 1024
"""Shared memory that all devices since 8.0 have."""


class TritonAttention:
    """Over a pool on the device where it lies. `dtype` is by default that of the pool's numbers."""

    def __init__(
        self,
        pool: PagePool,
        heads: int,
        scale: float,
        dtype: torch.dtype | None = None,
        *,
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
        self.scale = scale
        shared = shared_bytes_of(pool.device)
        self.decode = decode or decode_tuning(dim, self.dtype, shared)
        self.prefill = prefill or prefill_tuning(dim, self.dtype, shared)
        self.short_rows = max(1, MOST_PACKED // (heads // kv_heads))
        """Spans of more query rows are prefill."""
        self.multiprocessors = multiprocessors_of(pool.device)

    def begin(self, batch: RaggedBatch) -> TritonStep:
        """A step of any mix of spans, planned on the host: one small copy to the device, no waiting for it."""
        single, short, long = spans_by_length(batch, self.short_rows)
        tiles = cut_into_tiles(long, self.prefill.rows)
        *decodes, prefill = spans_on(self.pool.device, [single, short, tiles], batch.block_tables)
        plans = tuple(self.plan(spans) for spans in decodes if spans is not None)
        return TritonStep(self, TokenSlots(batch.write_slots, batch.cosines, batch.sines), plans, prefill)

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> TritonStep:
        """A step of spans of at most `short_rows` rows over tensors that are rewritten in place before each replay.

        What a CUDA graph captures: keep the step as long as the graph, which uses its workspace. A span that pads the
        batch has one row and a context of 0; its output is 0, and its token's slot must be in a page nobody reads.
        """
        assert spans.most_rows <= self.short_rows, f"{spans.most_rows} rows per span are prefill"
        return TritonStep(self, placement, (self.plan(spans),), None)

    def plan(self, spans: Spans) -> Decode:
        return Decode(spans, plan_decode(spans, self.pool, self.heads, self.multiprocessors, self.decode))

    def warm_up(self) -> None:
        """Compile every kernel that a step can need: none of them runs, since a launch of nothing only compiles."""
        pool = self.pool
        kv_heads, block, dim = pool.kv_heads, pool.block, pool.head_dim
        widest = -(-2 * self.decode.least_share // block)
        nothing = torch.empty(0, FIELDS, dtype=torch.int32, device=pool.device)
        tables = torch.zeros(1, widest, dtype=torch.int32, device=pool.device)
        q = torch.empty(0, self.heads, dim, dtype=self.dtype, device=pool.device)
        angles = torch.empty(0, dim // 2, device=pool.device)
        slots = torch.empty(0, dtype=torch.int64, device=pool.device)
        with torch.cuda.device_of(pool.numbers):
            rotate_and_store(q, q[:, :kv_heads], q[:, :kv_heads], pool, 0, TokenSlots(slots, angles, angles))
            for rows in {self.short_rows, *(1 << power for power in range(self.short_rows.bit_length()))}:
                for longest in (self.decode.least_share, 2 * self.decode.least_share):  # whole, split
                    spans = Spans(nothing, tables, rows, longest)
                    plan = plan_decode(spans, pool, self.heads, max(2, self.multiprocessors), self.decode)
                    decode_attention(q, pool, 0, spans, self.scale, q, plan)
            tile = Spans(nothing, tables, self.prefill.rows, 1)
            prefill_attention(q, pool, 0, tile, self.scale, q, self.prefill)


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """One launch over spans of few rows."""

    spans: Spans
    plan: DecodePlan


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
        return rotate_and_store(q, k, v, self._backend.pool, layer, self._placement)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert sinks is None, "devices refuse models with sinks"
        backend = self._backend
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for decode in self._decodes:
            decode_attention(q, backend.pool, layer, decode.spans, backend.scale, out, decode.plan)
        if self._prefill is not None:
            prefill_attention(q, backend.pool, layer, self._prefill, backend.scale, out, backend.prefill)
        return out.flatten(1)


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that a program can count on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in LIKE_HOPPER:
        return LEAST_SHARED_BYTES
    return HOPPER_SHARED_BYTES
