"""The places of a step in the window group: where it finds and writes window parts."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.shape import WindowShape
from twostroke.kv_cache.windows.window_group import window_group_of
from twostroke.scheduler.batch import Batch, GroupPlaces
from twostroke.scheduler.batching import Chunk, FurtherPlaces, Ints
from twostroke.scheduler.windows.progress import held_of


class WindowPlaces(FurtherPlaces):
    """Finds where a step's window parts lie."""

    has_any = True

    def __init__(self, window: WindowShape) -> None:
        self._window = window

    def kept_tokens(self, chunks: ListOf[Chunk], computed: Ints) -> Ints:
        return self._after(computed, [held_of(each[0]).full_blocks for each in chunks])

    def of(
        self, chunks: ListOf[Chunk], positions: Ints, rows: npt.NDArray[np.int64], computed: Ints, ends: Ints
    ) -> tuple[GroupPlaces, ...]:
        size, first = self._window.block_size, self._window.first
        tables = np.zeros((len(chunks), int((-(-ends // size)).max())), np.int32)
        for row, chunk in enumerate(chunks):
            slots_of, begin = held_of(chunk.sequence).slots, self._window.first_block(chunk.start)
            last = -(-int(ends[row]) // size)
            tables[row, begin:last] = [slots_of[block] - first for block in range(begin, last)]
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        kept = self._after(computed, [held_of(each[0]).filled_parts for each in chunks])
        slots[positions < kept[rows]] = self._window.slots * size  # the scratch row
        return (GroupPlaces(tables, slots),)

    def _after(self, computed: Ints, blocks: ListOf[int]) -> Ints:
        kept: Ints = np.maximum(computed, np.array(blocks, np.int32) * np.int32(self._window.block_size))
        return kept


def places_of(pool: BlockPool) -> FurtherPlaces:
    """Returns the object that finds the places of a step in further page groups."""
    windows = window_group_of(pool)
    return FurtherPlaces() if windows is None else WindowPlaces(windows.shape)


def with_windows(batch: Batch, window: WindowShape | None) -> Batch:
    """Returns a step that belongs to no sequence, with places in the window group if there is one.

    It writes to the scratch slot. It reads the scratch slot for the scratch page, and some slot for any other page.
    """
    if window is None:
        return batch
    scratch = window.slots * window.block_size + batch.positions.astype(np.int64) % window.block_size
    is_scratch = batch.block_tables == window.first
    tables = np.where(is_scratch, np.int32(window.slots), batch.block_tables % np.int32(window.slots))
    return replace(batch, further=(GroupPlaces(tables, scratch),))
