"""Page tables of steps: each sequence's own pages, however many, in whatever order sequences come, grow and go."""

from __future__ import annotations

import random

import numpy as np
import pytest

from twostroke.base.ids import PageId, RequestId, SessionId
from twostroke.request import SamplingParams
from twostroke.scheduler.batching import BatchBuilder, Chunk
from twostroke.scheduler.sequence import Sequence

BLOCK, SCRATCH = 16, 9999
BEYOND = [1, 127, 128, 129, 300, 1025, 5000]
"""Pages of a sequence: more than any step of a kernel or a table."""


def answering(pages: int, first_page: int, number: int = 1) -> Sequence:
    known = [token % 1000 for token in range(pages * BLOCK)]
    own = [PageId(first_page + page) for page in range(pages)]
    random.Random(number).shuffle(own)
    sampling = SamplingParams(seed=1, max_tokens=9)
    return Sequence(RequestId(f"r{number}"), SessionId(number), known, len(known) - 1, [], sampling=sampling, pages=own)


def rows_of(builder: BatchBuilder, chunks: list[Chunk]) -> None:
    """Builds a step, and compares its tables and slots with the pages of its sequences."""
    batch = builder.build(chunks).batch
    for row, (sequence, start, end, *_) in enumerate(chunks):
        used = -(-end // BLOCK)
        assert batch.block_tables[row, :used].tolist() == sequence.pages[:used]
        begin, stop = batch.query_starts[row], batch.query_starts[row + 1]
        slots = [sequence.pages[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, end)]
        assert batch.write_slots[begin:stop].tolist() == slots
    assert batch.block_tables.dtype == np.int32


@pytest.mark.parametrize("pages", BEYOND)
def test_a_long_prompt_and_a_long_answer_have_all_of_their_pages(pages: int) -> None:
    builder, sequence = BatchBuilder(BLOCK, SCRATCH, ()), answering(pages, 7)
    known = len(sequence.known)
    sequence.computed = max(0, known - 3 * BLOCK)
    rows_of(builder, [Chunk(sequence, sequence.computed, known, samples=False)])
    sequence.computed = known - 1
    rows_of(builder, [Chunk(sequence, known - 1, known, samples=True)])


def test_tables_of_the_step_before_are_used_again_by_the_same_sequences_alone() -> None:
    """Those that go on keep their rows, one that grows gets its new page, and another one gets none of theirs."""
    builder = BatchBuilder(BLOCK, SCRATCH, ())
    one, two, three = (answering(200, 1000 * number, number) for number in (1, 2, 3))
    for each in (one, two, three):
        each.computed = len(each.known) - 1
    both = [one, two]
    rows_of(builder, [Chunk(each, len(each.known) - 1, len(each.known), samples=True) for each in both])
    one.computed = len(one.known)
    one.known.append(5)
    one.pages.append(PageId(7777))
    rows_of(builder, [Chunk(each, len(each.known) - 1, len(each.known), samples=True) for each in both])
    rows_of(builder, [Chunk(each, len(each.known) - 1, len(each.known), samples=True) for each in (one, three)])
    rows_of(builder, [Chunk(each, len(each.known) - 1, len(each.known), samples=True) for each in (three, one)])
