"""Computes attention on a CPU with the native kernels. Decode rows and prefill chunks take one path, and pages are read
in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, AttentionRule
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.native_step import NativeRule, NativeStep
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.page_forms.form_kernels import FormKernels, kernels_of
from twostroke.kernels.pools.page_pool import PLAIN
from twostroke.kernels.pools.parted_pool import (
    AnyPool,
    UniformPool,
    first_exact,
    groups_of_parts,
    parts_of,
    places_of_layers,
    rules_of_parts,
    with_exact_slots,
)

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes of queries, keys and values, equal to `AttentionStep::dtype` in attention.h."""
FORMS: Final = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
"""Page forms in the order of `Form` in attention.h. Torch attends to pages of other forms."""


class NativePlace(ctypes.Structure):
    """Mirrors `LayerPlace` of attention.h, field by field."""

    _fields_ = (("step", ctypes.c_int32), ("layer", ctypes.c_int32))


class NativeHeadRows(ctypes.Structure):
    """Mirrors `HeadRows` of latents.h, field by field."""

    _fields_ = (("at", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))

    @classmethod
    def of(cls, rows: torch.Tensor) -> NativeHeadRows:
        """Returns the struct of rows [tokens, heads, D]."""
        return cls(rows.data_ptr(), rows.stride(0), rows.stride(1))


Rules = ctypes.Array[NativeRule]


class NativeAttention:
    """Attends over a pool whose layers have forms of `FORMS`, on the threads of `team`, or else on the calling thread.

    `dtype` is that of queries, keys and values; by default that of the pool's numbers.
    """

    def __init__(
        self,
        pool: AnyPool,
        heads: int,
        rules: AnyRules,
        kernels: Kernels,
        team: Team | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if pool.latent_dim:
            kernels.need("latents")
        if any(part.form.name not in PLAIN for part in parts_of(pool)):
            kernels.need("page_forms")
        parts = zip(parts_of(pool), rules_of_parts(pool, rules), strict=True)
        self.parts = [(part, kernels_of(part.form), _native_rules(of_part)) for part, of_part in parts]
        self.groups = groups_of_parts(pool)
        self.exact = first_exact(pool)
        self.places = places_of_layers(pool)
        native_places = (NativePlace * len(self.places))(*(NativePlace(*place) for place in self.places))
        self.places_address = ctypes.addressof(native_places)
        """The address of an array with each layer's place among the native steps, for other kernels of the same step.
        """
        self._keep = native_places
        assert pool.rope_dim % 2 == 0, "the kernel rotates the two halves of a head"
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.pool = pool
        self.dtype = dtype or parts_of(pool)[0].dtype
        self.heads = heads
        self.team = team
        self.native_store = kernels.function(
            "twostroke_store", (pointer, pointer, number, pointer, number, pointer, number, pointer, number)
        )
        rows = ctypes.POINTER(NativeHeadRows)
        self.native_store_latents = kernels.function(
            "twostroke_store_latents", (pointer, pointer, number, rows, pointer, number)
        )
        self.native_attend_latents = kernels.function(
            "twostroke_attend_latents", (pointer, pointer, number, rows, rows)
        )
        self.native_attend = kernels.function(
            "twostroke_attend", (pointer, pointer, number, pointer, number, pointer, pointer)
        )

    @property
    def team_address(self) -> int | None:
        return None if self.team is None else self.team.address

    def begin(self, batch: RaggedBatch) -> NativeAttentionStep:
        return NativeAttentionStep(self, batch)


class NativeAttentionStep:
    def __init__(self, backend: NativeAttention, batch: RaggedBatch) -> None:
        self._backend = backend
        query_starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        batch = with_exact_slots(batch, backend.exact)
        self._keep = (batch, query_starts)
        """Tensors that the native steps point into."""
        parts = zip(backend.parts, backend.groups, strict=True)
        steps = [self._step(*part, batch.of_group(group), query_starts) for part, group in parts]
        self._natives = (NativeStep * len(steps))(*steps)
        self.address = ctypes.addressof(self._natives)
        """The address of the native steps, for other kernels of the same step."""
        self.places_address = backend.places_address

    def _step(
        self, part: UniformPool, kernels: FormKernels, rules: Rules, batch: RaggedBatch, query_starts: torch.Tensor
    ) -> NativeStep:
        """Returns the native step of a part of the layers."""
        native = _native_step(self._backend, part, batch, query_starts)
        native.rules, native.ropes = rules, 2 * batch.cosines.shape[1] // part.rope_dim
        kernels.point(native, part, batch)
        return native

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dim = self._backend.pool.head_dim
        assert q.dtype == k.dtype == v.dtype == self._backend.dtype
        address, index = self._place(layer)
        if self._backend.pool.latent_dim is not None:
            ends = q[..., self._backend.pool.latent_dim :]
            self._backend.native_store_latents(
                self._backend.team_address, address, index, NativeHeadRows.of(ends), k.data_ptr(), k.stride(0)
            )
            return q
        # torch does not normalise the stride of a single head.
        assert all(x.shape[1] == 1 or x.stride(1) == dim for x in (q, k, v)), "heads must lie side by side"
        self._backend.native_store(
            self._backend.team_address,
            address,
            index,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
        )
        return q

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert q.dtype == self._backend.dtype
        assert sinks is None or sinks.dtype == torch.float32, "the kernel reads these as floats"
        if self._backend.pool.latent_dim is not None:
            return self._attend_latents(layer, q, self._backend.pool.latent_dim)
        out = torch.empty(q.shape, dtype=q.dtype)
        address, index = self._place(layer)
        self._backend.native_attend(
            self._backend.team_address,
            address,
            index,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
        )
        return out.flatten(1)

    def _attend_latents(self, layer: int, q: torch.Tensor, latent_dim: int) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], latent_dim)
        rows = (NativeHeadRows.of(q), NativeHeadRows.of(out))
        self._backend.native_attend_latents(self._backend.team_address, *self._place(layer), *rows)
        return out.flatten(1)

    def _place(self, layer: int) -> tuple[int, int]:
        """Returns the address of the native step that a layer belongs to, and the layer's index in it."""
        step, index = self._backend.places[layer]
        return ctypes.addressof(self._natives[step]), index


def _native_rules(rules: Sequence[AttentionRule]) -> Rules:
    """Returns the rules as an array of native structs."""
    for rule in rules:
        assert rule.scale > 0, "the kernel looks for the highest score before it scales"
    return (NativeRule * len(rules))(
        *(NativeRule(rule.scale, rule.softcap or 0, rule.window or 0, rule.rope) for rule in rules)
    )


def _native_step(
    backend: NativeAttention, pool: UniformPool, batch: RaggedBatch, query_starts: torch.Tensor
) -> NativeStep:
    """Returns the native step without the addresses of pages."""
    for tensor in (batch.cosines, batch.sines, batch.write_slots, batch.positions, batch.block_tables):
        assert tensor.is_contiguous(), "the kernel reads these as flat arrays"
    assert batch.positions.dtype == batch.block_tables.dtype == torch.int32
    assert batch.write_slots.dtype == torch.int64
    assert batch.cosines.dtype == batch.sines.dtype == torch.float32
    return NativeStep(
        block=pool.block,
        heads=backend.heads,
        kv_heads=pool.kv_heads,
        head_dim=pool.head_dim,
        tokens=len(batch.positions),
        cosines=batch.cosines.data_ptr(),
        sines=batch.sines.data_ptr(),
        write_slots=batch.write_slots.data_ptr(),
        positions=batch.positions.data_ptr(),
        sequences=batch.sequences,
        query_starts=query_starts.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        table_stride=batch.block_tables.stride(0),
        dtype=DTYPES[backend.dtype],
        form=FORMS.index(pool.form.name),
    )
