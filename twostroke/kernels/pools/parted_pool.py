"""Pages with layers of more than one form, or in several page groups. Each part of the layers has its own pool and
backend.

Kernels compute with pages of one form in one group. Only this module decides to which part a layer belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from twostroke.kernels.attention.interface import AttentionBackend, AttentionStep, RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, AttentionRule, rules_of
from twostroke.kernels.attention.spans import Spans, TokenSlots
from twostroke.kernels.page_forms.exact_pages import ExactPages, ExactPlaces, NoExactSlots
from twostroke.page_forms.page_form import PageForm


class UniformPool(Protocol):
    """Pages, or parts of pages, with layers of one form. The kernels of the form make it and know its content."""

    @property
    def form(self) -> PageForm: ...

    @property
    def layers(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def block(self) -> int:
        """Tokens of a block."""

    @property
    def head_dim(self) -> int: ...

    @property
    def rope_dim(self) -> int:
        """Numbers of a query and a key that are rotated."""

    @property
    def latent_dim(self) -> int | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of queries, keys and values."""

    @property
    def exact(self) -> ExactPages | None:
        """The exact pages of unfinished blocks, if the form stores blocks whole; else None."""


@dataclass(frozen=True, slots=True, eq=False)
class PartedPool:
    """The parts of pages, each with some of the layers."""

    parts: tuple[UniformPool, ...]
    layers_of_parts: tuple[tuple[int, ...], ...]
    """The model's layers in each part, in order."""
    groups_of_parts: tuple[int, ...]
    """The page group of each part."""

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
    def rope_dim(self) -> int:
        return self.parts[0].rope_dim

    @property
    def latent_dim(self) -> int | None:
        return self.parts[0].latent_dim

    @property
    def device(self) -> torch.device:
        return self.parts[0].device


AnyPool = UniformPool | PartedPool


def parts_of(pool: AnyPool) -> tuple[UniformPool, ...]:
    """Returns the pools of all parts. A pool of one form is its only part."""
    return pool.parts if isinstance(pool, PartedPool) else (pool,)


def layers_of_parts(pool: AnyPool) -> tuple[tuple[int, ...], ...]:
    """Returns the model's layers in each part."""
    return pool.layers_of_parts if isinstance(pool, PartedPool) else (tuple(range(pool.layers)),)


def groups_of_parts(pool: AnyPool) -> tuple[int, ...]:
    """Returns the page group of each part."""
    return pool.groups_of_parts if isinstance(pool, PartedPool) else (0,)


def places_of_layers(pool: AnyPool) -> list[tuple[int, int]]:
    """Returns for each of the model's layers the part that it is in, and its index among the part's layers."""
    parts = layers_of_parts(pool)
    places = {layer: (part, index) for part, layers in enumerate(parts) for index, layer in enumerate(layers)}
    return [places[layer] for layer in range(len(places))]


def rules_of_parts(pool: AnyPool, rules: AnyRules) -> list[tuple[AttentionRule, ...]]:
    """Returns the rules of the layers of each part."""
    parts = layers_of_parts(pool)
    every = rules_of(rules, sum(map(len, parts)))
    return [tuple(every[layer] for layer in layers) for layers in parts]


def exact_places(pool: AnyPool) -> ExactPlaces:
    """Returns the object that assigns slots to the exact tokens of unfinished blocks. They are the same in all
    parts."""
    exact = first_exact(pool)
    return NoExactSlots() if exact is None else exact.slots


def first_exact(pool: AnyPool) -> ExactPages | None:
    """Returns the exact pages of the first part that has any."""
    return next((part.exact for part in parts_of(pool) if part.exact is not None), None)


def with_exact_slots(batch: RaggedBatch, exact: ExactPages | None) -> RaggedBatch:
    """Returns a batch on the host with the slots of its exact tokens, which are the same in all parts.

    It frees the slots of the batch's released pages, so it is called once for each step.
    """
    if batch.exact_slots is not None or exact is None:
        return batch
    return replace(batch, exact_slots=exact.begin(batch))


class PartedAttention:
    """Attention over a `PartedPool`, with a backend for each part."""

    def __init__(self, pool: PartedPool, backends: Sequence[AttentionBackend]) -> None:
        self._places = places_of_layers(pool)
        self._groups = pool.groups_of_parts
        self._exact = first_exact(pool)
        self._backends = backends

    def begin(self, batch: RaggedBatch) -> PartedStep:
        batch = with_exact_slots(batch, self._exact)
        parts = zip(self._backends, self._groups, strict=True)
        return PartedStep(self._places, [backend.begin(batch.of_group(group)) for backend, group in parts])


class RecordedAttention(AttentionBackend, Protocol):
    """Attention that can be recorded: everything that a decode step depends on is on the device."""

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> AttentionStep:
        """Returns a step over tensors that are rewritten in place before each replay."""


class PartedDeviceAttention:
    """Attention over a `PartedPool` on a device, with a backend for each part that can be recorded."""

    def __init__(self, pool: PartedPool, backends: Sequence[RecordedAttention]) -> None:
        self._places = places_of_layers(pool)
        self._groups = pool.groups_of_parts
        self._backends = backends
        self._unrecorded = PartedAttention(pool, backends)

    def begin(self, batch: RaggedBatch) -> PartedStep:
        return self._unrecorded.begin(batch)

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> PartedStep:
        parts = zip(self._backends, self._groups, strict=True)
        steps = [backend.begin_decode(*placement.of_group(group, spans)) for backend, group in parts]
        return PartedStep(self._places, steps)


class PartedStep:
    """Attention of one step, layer by layer. The step of a layer's part computes it."""

    def __init__(self, places: Sequence[tuple[int, int]], steps: Sequence[AttentionStep]) -> None:
        self._of_layer = [(steps[part], index) for part, index in places]

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step, index = self._of_layer[layer]
        return step.store(index, q, k, v)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step, index = self._of_layer[layer]
        return step.attend(index, q, sinks)
