"""Recorded decode steps: which recording takes a step, what pads it, and that its inputs stay where they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.batches import Stream, step
from twostroke.engine.backends.cuda.accelerator import CpuAccelerator
from twostroke.engine.backends.cuda.decode_graphs import (
    DecodeGraphs,
    DecodeInputs,
    PageTable,
    graph_sizes,
    is_decode_step,
    padded,
)
from twostroke.kernels.page_forms.exact_pages import NoExactSlots
from twostroke.scheduler.batch import Batch

PAGES = PageTable(block_size=16, max_blocks=8, scratch_page=40)


def decode_batch(contexts: list[int]) -> Batch:
    """One token each, sequence n on pages 5n, 5n + 1, ..."""
    streams = []
    for row, context in enumerate(contexts):
        pages = list(range(5 * row, 5 * row - (-context // 16)))
        streams.append((Stream(list(range(100 * row, 100 * row + context)), pages, computed=context - 1), 1))
    return step(streams)


def test_sizes_end_with_the_largest_step() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(2) == (1, 2)
    assert graph_sizes(7) == (1, 2, 4, 7)
    assert graph_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(300)[-4:] == (248, 256, 288, 300)


@pytest.mark.parametrize("most", [1, 3, 8, 9, 63, 64, 255, 256, 257, 1000])
def test_every_step_finds_a_size_and_pads_little(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = min(size for size in sizes if size >= rows)
        assert size - rows <= (7 if rows <= 256 else 31)


def test_a_step_with_a_prompt_chunk_is_no_decode_step() -> None:
    assert is_decode_step(decode_batch([3, 40]))
    assert not is_decode_step(step([(Stream([1, 2, 3], [0]), 3)]))
    assert not is_decode_step(step([(Stream([1, 2, 3], [0]), 2), (Stream([1, 2], [1], computed=1), 1)]))


def test_padding_reads_one_scratch_token_and_writes_to_scratch() -> None:
    batch = decode_batch([3, 40])
    slots, count, fields, tokens, positions, tables = padded(batch, 4, PAGES)
    assert count.tolist() == [batch.sequences]
    assert slots.tolist() == [2, 7 * 16 + 7, 640, 640]
    assert fields.tolist() == [[0, 0, 1, 3], [1, 1, 1, 40], [2, 2, 1, 1], [3, 3, 1, 1]]
    assert tokens.tolist() == [2, 139, 0, 0]
    assert positions.tolist() == [2, 39, 0, 0]
    assert tables.tolist() == [[0, 0, 0], [5, 6, 7], [40, 40, 40], [40, 40, 40]]
    assert slots.dtype == np.int64
    assert {array.dtype for array in (fields, tokens, positions, tables)} == {np.dtype(np.int32)}


def test_padding_writes_to_the_scratch_row_of_each_page_group() -> None:
    streams = [(Stream(list(range(20)), [4, 5], computed=19, window_rows=[2, 9]), 1)]
    pages = replace(PAGES, further_scratch_rows=(12,))
    slots, window_slots, *_, tables, window_tables = padded(step(streams), 2, pages)
    assert slots.tolist() == [5 * 16 + 3, 640]
    assert window_slots.tolist() == [9 * 16 + 3, 12 * 16]
    assert tables.tolist() == [[4, 5], [40, 40]]
    assert window_tables.tolist() == [[2, 9], [12, 12]]


class Spy:
    """Instead of a model: says which sequence's page a row would read last, and remembers the tensors it was given."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, ...]] = []

    def __call__(self, inputs: DecodeInputs) -> tuple[torch.Tensor, ...]:
        fields, tables = inputs.spans.fields, inputs.spans.block_tables
        self.recorded.append(tuple(x.data_ptr() for x in (inputs.tokens, inputs.positions, fields, tables)))
        last = ((fields[:, 3] - 1) // 16).long()
        pages = tables[torch.arange(len(tables)), last]
        return inputs.tokens.long(), torch.stack([pages.long(), inputs.write_slots, inputs.positions.long()])


def graphs(spy: Spy, most: int = 8, **kwargs: Any) -> DecodeGraphs:
    return DecodeGraphs(spy, CpuAccelerator(), graph_sizes(most), PAGES, NoExactSlots(), **kwargs)


def test_each_row_of_a_replay_sees_its_own_sequence() -> None:
    replayed = graphs(Spy())
    for contexts in ([17], [100, 1, 33], [16, 16], [5, 80, 6, 7, 8, 2], [128] * 8, [1, 2, 3]):
        tokens, (pages, slots, positions) = replayed.run(decode_batch(contexts))
        rows = len(contexts)
        assert tokens[:rows].tolist() == [100 * row + context - 1 for row, context in enumerate(contexts)]
        assert pages[:rows].tolist() == [5 * row + (context - 1) // 16 for row, context in enumerate(contexts)]
        assert slots[:rows].tolist() == [
            16 * (5 * row + (context - 1) // 16) + (context - 1) % 16 for row, context in enumerate(contexts)
        ]
        assert positions[:rows].tolist() == [context - 1 for context in contexts]
        assert set(pages[rows:].tolist()) <= {PAGES.scratch_page}, "padding reads the scratch page whatever ran before"
        assert set(slots[rows:].tolist()) <= {640}


def test_a_recording_reads_the_same_tensors_at_every_replay() -> None:
    spy = Spy()
    replayed = graphs(spy, most=4)
    made = len(spy.recorded)
    assert made == 3, "one per size, the largest first"
    for contexts in ([9, 9, 9], [30], [30, 100]):
        replayed.run(decode_batch(contexts))
    assert [spy.recorded[:made].index(seen) for seen in spy.recorded[made:]] == [0, 2, 1]


def test_outputs_of_a_recording_stay_where_they_are() -> None:
    replayed = graphs(Spy())
    first, _ = replayed.run(decode_batch([9, 9, 9]))
    second, _ = replayed.run(decode_batch([20, 21, 22, 23]))
    assert first.data_ptr() == second.data_ptr()


def test_what_is_larger_than_every_recording_is_not_taken() -> None:
    replayed = graphs(Spy(), most=2)
    assert replayed.takes(decode_batch([5, 6]))
    assert not replayed.takes(decode_batch([5, 6, 7]))
    assert not replayed.takes(step([(Stream([1, 2, 3], [0]), 2)]))
