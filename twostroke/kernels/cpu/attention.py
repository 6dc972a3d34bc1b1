"""Attention on a CPU: rows that ask alone (decode) go over their pages where they lie, longer spans through torch."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from twostroke.kernels.attention import RaggedBatch
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.torch_attention import Span, TorchAttention, span_of

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As `Step::dtype` in attention.cpp counts them."""

NATIVE_QUERY_LEN: Final = 16
"""Spans up to this long are computed row by row: reading their context again per row is cheaper than gathering it."""


class NativeStep(ctypes.Structure):
    """`Step` of attention.cpp, field by field."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("layer_stride", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("write_slots", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("row_tokens", ctypes.c_void_p),
        ("row_sequences", ctypes.c_void_p),
        ("row_contexts", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class NativeAttention:
    """Over a contiguous pool in one of `DTYPES`."""

    def __init__(
        self, pool: torch.Tensor, heads: int, scale: float, kernels: Kernels, team: Team | None = None
    ) -> None:
        assert pool.is_contiguous(), "the kernel assumes a whole pool"
        self.pool = pool
        self.heads = heads
        self.scale = scale
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.native_store = kernels.function(
            "twostroke_store", (pointer, number, pointer, number, pointer, number, pointer, number)
        )
        self.native_attend = kernels.function("twostroke_attend", (pointer, number, pointer, number, pointer))
        self.team = team
        self.torch = TorchAttention(pool, heads, scale)

    def begin(self, batch: RaggedBatch) -> NativeAttentionStep:
        return NativeAttentionStep(self, batch)


class NativeAttentionStep:
    def __init__(self, backend: NativeAttention, batch: RaggedBatch) -> None:
        self._backend = backend
        self._spans: list[Span] = []
        tokens: list[int] = []
        sequences: list[int] = []
        for sequence in range(batch.sequences):
            start, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
            if end - start > NATIVE_QUERY_LEN:
                self._spans.append(span_of(batch, sequence))
            else:
                tokens.extend(range(start, end))
                sequences.extend([sequence] * (end - start))
        row_tokens = torch.tensor(tokens, dtype=torch.int32)
        row_sequences = torch.tensor(sequences, dtype=torch.int32)
        row_contexts = batch.positions[row_tokens] + 1
        self._has_rows = bool(tokens)
        self._keep = (batch, row_tokens, row_sequences, row_contexts)
        """What the native step points into."""
        self._native = _native_step(backend, batch, row_tokens, row_sequences, row_contexts)
        self.address = ctypes.addressof(self._native)
        """Of the native step, for kernels that go on from here."""

    @property
    def is_native(self) -> bool:
        """Whether the native kernel attends for all rows."""
        return not self._spans

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dim = self._native.head_dim
        assert q.stride(1) == k.stride(1) == v.stride(1) == dim, "heads must lie side by side"
        self._backend.native_store(
            self.address, layer, q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        )
        return q

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        if self._has_rows:
            self._backend.native_attend(self.address, layer, q.data_ptr(), q.stride(0), out.data_ptr())
        for span in self._spans:
            self._backend.torch.attend_span(layer, span, q, out)
        return out.flatten(1)


def _native_step(
    backend: NativeAttention,
    batch: RaggedBatch,
    row_tokens: torch.Tensor,
    row_sequences: torch.Tensor,
    row_contexts: torch.Tensor,
) -> NativeStep:
    pool = backend.pool
    for tensor in (batch.cosines, batch.sines, batch.write_slots, batch.block_tables):
        assert tensor.is_contiguous(), "the kernel walks these by index"
    assert batch.block_tables.dtype == torch.int32
    assert batch.write_slots.dtype == torch.int64
    return NativeStep(
        pool=pool.data_ptr(),
        page_stride=pool.stride(0),
        layer_stride=pool.stride(1),
        value_offset=pool.stride(2),
        head_stride=pool.stride(3),
        block=pool.shape[4],
        heads=backend.heads,
        kv_heads=pool.shape[3],
        head_dim=pool.shape[5],
        tokens=len(batch.positions),
        cosines=batch.cosines.data_ptr(),
        sines=batch.sines.data_ptr(),
        write_slots=batch.write_slots.data_ptr(),
        rows=len(row_tokens),
        row_tokens=row_tokens.data_ptr(),
        row_sequences=row_sequences.data_ptr(),
        row_contexts=row_contexts.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        table_stride=batch.block_tables.stride(0),
        scale=backend.scale,
        dtype=DTYPES[pool.dtype],
    )
