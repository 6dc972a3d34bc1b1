"""Decode steps recorded once per batch size and replayed: a step is one launch, however many kernels it is made of.

A step of n sequences replays the smallest recording that holds them. The rows beyond n are padding: they read one token
from the scratch page and write to it, and their results are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from twostroke.engine.backends.cuda.accelerator import Accelerator, Recording
from twostroke.engine.backends.cuda.staging import HostArray, Staging, packed_offsets
from twostroke.kernels.attention.interface import RaggedPlaces
from twostroke.kernels.attention.spans import FIELDS, Spans
from twostroke.kernels.page_forms.exact_pages import ExactPlaces
from twostroke.scheduler.batch import Batch, GroupPlaces

SMALL_SIZES: Final = (1, 2, 4)
SIZE_STEP: Final = 8
"""Rows between two sizes up to `LARGE`. At most 7 rows are padding, which is cheap as weights must be read anyway."""
LARGE: Final = 256
LARGE_STEP: Final = 32
"""Rows between two sizes above `LARGE`: fewer recordings, and padding is a small share all the same."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """One token of each of B sequences, in tensors that stay where they are."""

    tokens: torch.Tensor
    """int32 [B]"""
    positions: torch.Tensor
    """int32 [B]"""
    spans: Spans
    """One span of one row for each sequence; entries of block tables beyond a row's context are stale."""
    write_slots: torch.Tensor
    """int64 [B]"""
    exact_slots: torch.Tensor
    """int64 [B], or [0] in forms that store each token on its own"""
    count: torch.Tensor
    """int32 [1]: how many of the first rows are tokens; the others pad the batch"""
    further: tuple[RaggedPlaces, ...]
    """Places in each further page group"""


Forward = Callable[[DecodeInputs], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """The dimensions of block tables, and the pages that pad them."""

    block_size: int
    max_blocks: int
    """Blocks of the longest sequence."""
    scratch_page: int
    further_scratch_rows: tuple[int, ...] = ()
    """The scratch row of each further page group."""

    @property
    def max_positions(self) -> int:
        return self.max_blocks * self.block_size


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the batch sizes to record, ascending. The last one holds the largest step."""
    sizes = [*SMALL_SIZES, *range(SIZE_STEP, LARGE, SIZE_STEP), *range(LARGE, max_num_seqs, LARGE_STEP)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def is_decode_step(batch: Batch) -> bool:
    """Returns whether every sequence has one new token."""
    return len(batch.tokens) == batch.sequences


def padded(batch: Batch, size: int, pages: PageTable) -> list[HostArray]:
    """Returns the host arrays of a step of `size` rows.

    They are, in this order: write slots in each page group, the count of tokens, span fields, tokens, positions, and
    the block tables of each group.
    """
    rows = batch.sequences
    own: tuple[Batch | GroupPlaces, ...] = (batch, *batch.further)
    scratch = (pages.scratch_page, *pages.further_scratch_rows)
    assert len(own) == len(scratch), f"{len(own)} page groups where there are {len(scratch)}"
    all_slots = [np.full(size, page * pages.block_size, np.int64) for page in scratch]
    all_tables = [
        np.full((size, places.block_tables.shape[1]), page, np.int32) for places, page in zip(own, scratch, strict=True)
    ]
    for places, slots, tables in zip(own, all_slots, all_tables, strict=True):
        slots[:rows], tables[:rows] = places.write_slots, places.block_tables
    fields = np.ones((size, FIELDS), np.int32)  # one row, one token of context
    tokens = np.zeros(size, np.int32)
    positions = np.zeros(size, np.int32)
    fields[:, 0] = fields[:, 1] = np.arange(size)
    tokens[:rows], positions[:rows], fields[:rows, 3] = batch.tokens, batch.positions, batch.context_lens
    return [*all_slots, np.array([rows], np.int32), fields, tokens, positions, *all_tables]


class DecodeGraphs:
    """Records `forward` for every size when it is made. Only the thread that runs steps calls `run`."""

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
        self._tables = [
            torch.full((largest, pages.max_blocks), page, dtype=torch.int32, device=device)
            for page in (pages.scratch_page, *pages.further_scratch_rows)
        ]
        self._staging = Staging(packed_offsets(self._padding(largest, pages.max_blocks))[-1], device)
        # Largest first: the smaller ones then fit into the memory that it has allocated.
        self._recordings = {size: self._record(forward, accelerator, size) for size in reversed(self._sizes)}

    def takes(self, batch: Batch) -> bool:
        return is_decode_step(batch) and not batch.scores and batch.sequences <= self._sizes[-1]

    def run(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Returns what `forward` returned for the batch, padding rows last; valid until the next run."""
        size = next(size for size in self._sizes if size >= batch.sequences)
        uploaded = self._staging.upload(self._arrays(batch, size))[-len(self._tables) :]
        for kept, tables in zip(self._tables, uploaded, strict=True):
            kept[:size, : tables.shape[1]].copy_(tables)
        recording = self._recordings[size]
        recording.replay()
        return recording.outputs

    def _record(self, forward: Forward, accelerator: Accelerator, size: int) -> Recording:
        arrays = self._padding(size, 1)
        groups = len(self._tables)
        exact_slots, *slots = (uploaded := self._staging.upload(arrays))[: 1 + groups]
        count, fields, tokens, positions = uploaded[1 + groups : -groups]
        own, *others = (tables[:size] for tables in self._tables)
        spans = Spans(fields, own, 1, self._pages.max_positions)
        further = tuple(map(RaggedPlaces, others, slots[1:]))
        inputs = DecodeInputs(tokens, positions, spans, slots[0], exact_slots, count, further)
        return accelerator.record(lambda: forward(inputs))

    def _padding(self, size: int, blocks: int) -> list[HostArray]:
        """Returns a step with only padding."""
        none, nowhere = np.zeros(0, np.int32), np.zeros(0, np.int64)
        tables = np.zeros((0, blocks), np.int32)
        further = (GroupPlaces(tables, nowhere),) * len(self._pages.further_scratch_rows)
        return self._arrays(Batch(none, none, np.zeros(1, np.int32), none, tables, nowhere, further=further), size)

    def _arrays(self, batch: Batch, size: int) -> list[HostArray]:
        """Returns the arrays of a step: slots of exact tokens first, block tables last. All but the tables then have
        the same offsets in every step of this size."""
        arrays = padded(batch, size, self._pages)
        groups = len(self._tables)
        positions, tables = arrays[-1 - groups], arrays[-groups]
        return [self._exact.begin(np.arange(size), tables, positions, batch.released), *arrays]
