"""Pages whose layers have more than one form: a pool over each part of their layers, and a backend of its own for it.

Kernels know pages of one form. Here alone is decided which of them a layer belongs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from twostroke.kernels.attention import AttentionBackend, AttentionStep, RaggedBatch
from twostroke.kernels.attention_rules import AnyRules, AttentionRule, rules_of
from twostroke.kernels.exact_pages import ExactPlaces, NoExactSlots
from twostroke.kernels.nibble_pool import NibblePool
from twostroke.kernels.page_pool import PagePool
from twostroke.kernels.spans import Spans, TokenSlots

UniformPool = PagePool | NibblePool
"""Pages, or parts of them, whose layers all have the same form."""


@dataclass(frozen=True, slots=True, eq=False)
class PartedPool:
    """Views of the same pages, each of some layers, in the order of layers."""

    parts: tuple[UniformPool, ...]

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.parts[0].block

    @property
    def kv_heads(self) -> int:
        return self.parts[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.parts[0].head_dim

    @property
    def device(self) -> torch.device:
        return self.parts[0].device


AnyPool = PagePool | NibblePool | PartedPool


def parts_of(pool: AnyPool) -> tuple[UniformPool, ...]:
    """Return the pools of the parts of the layers; a pool of one form is its only part."""
    return pool.parts if isinstance(pool, PartedPool) else (pool,)


def rules_of_parts(pool: AnyPool, rules: AnyRules) -> list[tuple[AttentionRule, ...]]:
    """Return the rules of the layers of each part."""
    counts = [part.layers for part in parts_of(pool)]
    ends = list(itertools.accumulate(counts))
    every = rules_of(rules, ends[-1])
    return [every[end - count : end] for count, end in zip(counts, ends, strict=True)]


def exact_places(pool: AnyPool) -> ExactPlaces:
    """Return what says where the tokens of unfinished blocks lie exact."""
    slots = [part.exact.slots for part in parts_of(pool) if isinstance(part, NibblePool)]
    return slots[0] if slots else NoExactSlots()


class PartedAttention:
    """A backend for each part of the layers."""

    def __init__(self, pool: PartedPool, backends: Sequence[AttentionBackend]) -> None:
        self._layers = _layers_of(pool)
        self._backends = backends

    def begin(self, batch: RaggedBatch) -> PartedStep:
        return PartedStep(self._layers, [backend.begin(batch) for backend in self._backends])


class RecordedAttention(AttentionBackend, Protocol):
    """Attention that can be recorded: everything that a decode step depends on lies on the device."""

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> AttentionStep:
        """Return a step over tensors that are rewritten in place before each replay."""


class PartedDeviceAttention:
    """A backend that can be recorded for each part of the layers."""

    def __init__(self, pool: PartedPool, backends: Sequence[RecordedAttention]) -> None:
        self._layers = _layers_of(pool)
        self._backends = backends
        self._unrecorded = PartedAttention(pool, backends)

    def begin(self, batch: RaggedBatch) -> PartedStep:
        return self._unrecorded.begin(batch)

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> PartedStep:
        return PartedStep(self._layers, [backend.begin_decode(spans, placement) for backend in self._backends])


class PartedStep:
    """Attention of one step, layer by layer: each by the step of its part."""

    def __init__(self, layers: Sequence[int], steps: Sequence[AttentionStep]) -> None:
        self._of_layer = [(step, index) for count, step in zip(layers, steps, strict=True) for index in range(count)]

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step, index = self._of_layer[layer]
        return step.store(index, q, k, v)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step, index = self._of_layer[layer]
        return step.attend(index, q, sinks)


def _layers_of(pool: PartedPool) -> list[int]:
    return [part.layers for part in pool.parts]
