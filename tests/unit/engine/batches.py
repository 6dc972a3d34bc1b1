"""Batches made by hand, as a scheduler would make them: one sequence over given pages, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.request import SamplingParams
from twostroke.scheduler.batch import Batch, GroupPlaces, Runner, SampleRow

GREEDY = SamplingParams(seed=0, max_tokens=1000, temperature=0)


@dataclass
class Stream:
    """A stream of known tokens over pages of its own."""

    tokens: list[int]
    pages: list[int]
    computed: int = 0
    params: SamplingParams = GREEDY
    window_rows: list[int] | None = None
    """Rows of the window group, one for each block; None for models that have none."""


def step(sequences: Sequence[tuple[Stream, int]], block_size: int = 16) -> Batch:
    """Advances each sequence by so many tokens; those whose known tokens are then all computed sample."""
    tokens, positions, slots, starts, contexts, samples = [], [], [], [0], [], []
    window_tables, window_slots = [], []
    widest = max(len(sequence.pages) for sequence, _ in sequences)
    tables = np.zeros((len(sequences), widest), np.int32)
    for row, (sequence, count) in enumerate(sequences):
        end = sequence.computed + count
        at = np.arange(sequence.computed, end, dtype=np.int32)
        tables[row, : len(sequence.pages)] = sequence.pages
        if sequence.window_rows is not None:
            own = np.array(sequence.window_rows, np.int32)
            window_tables.append(own)
            window_slots.append(own[at // block_size].astype(np.int64) * block_size + at % block_size)
        tokens += sequence.tokens[sequence.computed : end]
        positions.append(at)
        slots.append(tables[row, at // block_size].astype(np.int64) * block_size + at % block_size)
        starts.append(starts[-1] + count)
        contexts.append(end)
        if end == len(sequence.tokens):
            samples.append(SampleRow(row, sequence.params, position=end))
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.concatenate(positions),
        query_starts=np.array(starts, np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
        write_slots=np.concatenate(slots),
        samples=tuple(samples),
        further=(GroupPlaces(np.stack(window_tables), np.concatenate(window_slots)),) if window_tables else (),
    )


def generate(runner: Runner, sequence: Stream, count: int, chunk: int, block_size: int = 16) -> list[int]:
    """Prefill in chunks, then decode; the `count` tokens sampled."""
    answer: list[int] = []
    while len(answer) < count:
        size = min(chunk, len(sequence.tokens) - sequence.computed)
        result = runner.run(step([(sequence, size)], block_size))
        sequence.computed += size
        if result.tokens:
            answer.append(result.tokens[0].token)
            sequence.tokens.append(answer[-1])
    return answer
