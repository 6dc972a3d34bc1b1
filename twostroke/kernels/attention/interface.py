"""The interface of attention over pages, and its arguments for a step.

A backend is chosen once, at construction, for one pool on one device. For each step it gets the ragged batch. For each
layer it stores keys and values into pages and attends to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from twostroke.observability.profiler import KernelRecords


@dataclass(frozen=True, slots=True, eq=False)
class RaggedPlaces:
    """`schedule.batch.GroupPlaces` as tensors on the pool's device."""

    block_tables: torch.Tensor
    """int32 [S, widest], contiguous"""
    write_slots: torch.Tensor
    """int64 [T]: row * block + offset"""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """`schedule.batch.Batch` without its samples, as tensors on the pool's device. T tokens of S sequences."""

    positions: torch.Tensor
    """int32 [T]"""
    query_starts: tuple[int, ...]
    """[S + 1], on the host."""
    context_lens: tuple[int, ...]
    """[S], on the host: number of tokens that the last query token of each sequence attends to."""
    block_tables: torch.Tensor
    """int32 [S, widest], contiguous: pages of the first page group"""
    write_slots: torch.Tensor
    """int64 [T]: page * block + offset"""
    cosines: torch.Tensor
    """float32 [T, ropes * rope_dim / 2], of each token's position: the ropes of the model side by side"""
    sines: torch.Tensor
    released: tuple[int, ...] = ()
    """Pages whose blocks were finished or given up since the step before."""
    exact_slots: torch.Tensor | None = None
    """int64 [T]: exact page * block + offset, in forms whose scales span a block; None until it is decided."""
    further: tuple[RaggedPlaces, ...] = ()
    """Places in each further page group; empty where its pages lie where the first group's do."""
    added: Any = None
    """What is added to matrix products of this step, in the form in which the model takes it, or None for nothing."""
    kernels: KernelRecords | None = None
    """The record of native kernels while a profile is taken; None otherwise."""

    def angles(self, rope: int, rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines of one rope, each [T, rope_dim / 2]."""
        columns = slice(rope * rope_dim // 2, (rope + 1) * rope_dim // 2)
        return self.cosines[:, columns], self.sines[:, columns]

    def of_group(self, group: int) -> RaggedBatch:
        """Returns the batch as layers of one page group see it."""
        if group == 0 or not self.further:
            return self
        own = self.further[group - 1]
        return replace(self, block_tables=own.block_tables, write_slots=own.write_slots, further=())

    @property
    def sequences(self) -> int:
        return len(self.context_lens)


class AttentionStep(Protocol):
    """Attention of one step, layer by layer.

    Pages of latents have one kv head and only keys: v is the latent with which k begins. Only the part of queries and
    keys after the latent is rotated.
    """

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Rotates q [T, heads, D] and k [T, kv_heads, D], and writes k and v into their slots. Returns the rotated
        q."""

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, heads * value_dim]. Token j attends to the tokens up to positions[j] that the layer's rule lets
        it see.

        `sinks`: float32 [heads], an additional score of each head's softmax. The value of that score is zero.
        """


class AttentionBackend(Protocol):
    """Attention over one pool."""

    def begin(self, batch: RaggedBatch) -> AttentionStep: ...
