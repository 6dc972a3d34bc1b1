"""Batch sizes of decode steps that are recorded on a device. Plain numbers, which the memory bill needs."""

from __future__ import annotations

from typing import Final

SMALL_SIZES: Final = (1, 2, 4)
SIZE_STEP: Final = 8
"""Between larger sizes: at most 7 rows are padding, which cost next to nothing where weights must be read anyway."""
LARGE: Final = 256
LARGE_STEP: Final = 32
"""Above LARGE: fewer recordings, and padding is a small share all the same."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the batch sizes to record, ascending. The last one holds the largest step."""
    sizes = [*SMALL_SIZES, *range(SIZE_STEP, LARGE, SIZE_STEP), *range(LARGE, max_num_seqs, LARGE_STEP)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
