"""Decode steps recorded once per batch size and replayed: a step is one launch, however many kernels it is made of.

A step of n sequences replays the smallest recording that holds them. The rows beyond n are padding: they read one
token from the scratch page and write to it, and nobody looks at what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.engine.accelerator import Accelerator, Recording
from twostroke.engine.staging import HostArray, Staging, packed_offsets
from twostroke.kernels.exact_pages import ExactPlaces
from twostroke.kernels.spans import FIELDS, Spans
from twostroke.scheduler.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """One token of each of B sequences, in tensors that stay where they are."""

    tokens: torch.Tensor
    """int32 [B]"""
    positions: torch.Tensor
    """int32 [B]"""
    spans: Spans
    """The spans of one row each; block tables are stale beyond a row's context."""
    write_slots: torch.Tensor
    """int64 [B]"""
    exact_slots: torch.Tensor
    """int64 [B], or [0] in forms that store each token on its own"""
    count: torch.Tensor
    """int32 [1]: how many of the first rows are tokens; the others pad the batch"""


Forward = Callable[[DecodeInputs], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """What block tables may hold."""

    block_size: int
    max_blocks: int
    """Blocks of the longest sequence."""
    scratch_page: int

    @property
    def max_positions(self) -> int:
        return self.max_blocks * self.block_size


def is_decode_step(batch: Batch) -> bool:
    """Whether every sequence has one new token."""
    return len(batch.tokens) == batch.sequences


def padded(batch: Batch, size: int, pages: PageTable) -> list[HostArray]:
    """Write slots, the count of tokens, span fields, tokens, positions and block tables of `size` rows."""
    rows = batch.sequences
    slots = np.full(size, pages.scratch_page * pages.block_size, np.int64)
    fields = np.ones((size, FIELDS), np.int32)  # one row, one token of context
    tokens = np.zeros(size, np.int32)
    positions = np.zeros(size, np.int32)
    tables = np.full((size, batch.block_tables.shape[1]), pages.scratch_page, np.int32)
    fields[:, 0] = fields[:, 1] = np.arange(size)
    slots[:rows], tokens[:rows], positions[:rows] = batch.write_slots, batch.tokens, batch.positions
    fields[:rows, 3], tables[:rows] = batch.context_lens, batch.block_tables
    return [slots, np.array([rows], np.int32), fields, tokens, positions, tables]


class DecodeGraphs:
    """Records `forward` at once, for every size; `run` belongs to the thread that runs steps."""

    def __init__(
        self,
        forward: Forward,
        accelerator: Accelerator,
        sizes: Sequence[int],
        pages: PageTable,
        exact: ExactPlaces,
    ) -> None:
        self._sizes = tuple(sizes)
        self._exact = exact
        self._pages = pages
        largest = self._sizes[-1]
        device = accelerator.device
        self._tables = torch.full((largest, pages.max_blocks), pages.scratch_page, dtype=torch.int32, device=device)
        self._staging = Staging(packed_offsets(self._padding(largest, pages.max_blocks))[-1], device)
        # Largest first: the smaller ones then fit into the memory that it has taken.
        self._recordings = {size: self._record(forward, accelerator, size) for size in reversed(self._sizes)}

    def takes(self, batch: Batch) -> bool:
        return is_decode_step(batch) and batch.sequences <= self._sizes[-1]

    def run(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """What `forward` returned for the batch, padding rows last; good until the next run."""
        size = next(size for size in self._sizes if size >= batch.sequences)
        tables = self._staging.upload(self._arrays(batch, size))[-1]
        self._tables[:size, : tables.shape[1]].copy_(tables)
        recording = self._recordings[size]
        recording.replay()
        return recording.outputs

    def _record(self, forward: Forward, accelerator: Accelerator, size: int) -> Recording:
        arrays = self._padding(size, 1)
        exact_slots, slots, count, fields, tokens, positions, _ = self._staging.upload(arrays)
        spans = Spans(fields, self._tables[:size], 1, self._pages.max_positions)
        inputs = DecodeInputs(tokens, positions, spans, slots, exact_slots, count)
        return accelerator.record(lambda: forward(inputs))

    def _padding(self, size: int, blocks: int) -> list[HostArray]:
        """A step of padding alone."""
        none, nowhere = np.zeros(0, np.int32), np.zeros(0, np.int64)
        return self._arrays(
            Batch(none, none, np.zeros(1, np.int32), none, np.zeros((0, blocks), np.int32), nowhere), size
        )

    def _arrays(self, batch: Batch, size: int) -> list[HostArray]:
        """The places of exact tokens before the rest, so that everything but the tables lies where it always does."""
        arrays = padded(batch, size, self._pages)
        *_, positions, tables = arrays
        return [self._exact.begin(np.arange(size), tables, positions, batch.released), *arrays]
