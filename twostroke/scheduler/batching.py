"""The batch builder turns chosen token ranges into the arrays of a Batch."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.scheduler.batch import Batch, SampleRow
from twostroke.scheduler.sequence import Sequence

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Run tokens [start, end) of a sequence; where `samples`, draw the next token after the last one."""

    sequence: Sequence
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]
    batch: Batch


class StepBuilder(Protocol):
    def build(self, chunks: ListOf[Chunk]) -> Step:
        """Return the step that runs `chunks` in this order."""


class BatchBuilder:
    def __init__(self, block_size: int, scratch_page: int, eos_token_ids: tuple[int, ...]) -> None:
        self._block_size = block_size
        self._scratch_slot = scratch_page * block_size
        self._eos = eos_token_ids

    def build(self, chunks: ListOf[Chunk]) -> Step:
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        ends = np.array([chunk.end for chunk in chunks], np.int32)
        computed = np.array([chunk.sequence.computed for chunk in chunks], np.int32)
        query_starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(ends - starts, out=query_starts[1:])
        rows = np.repeat(np.arange(len(chunks)), ends - starts)
        positions = np.arange(len(rows), dtype=np.int32) + (starts - query_starts[:-1])[rows]
        tables = self._tables(chunks, ends)
        slots = tables[rows, positions // self._block_size].astype(np.int64) * self._block_size
        slots += positions % self._block_size
        slots[positions < computed[rows]] = self._scratch_slot  # computed tokens are not written again
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.sequence.known[chunk.start : chunk.end]
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            query_starts=query_starts,
            context_lens=ends,
            block_tables=tables,
            write_slots=slots,
            samples=tuple([self._sample_row(row, chunk) for row, chunk in enumerate(chunks) if chunk.samples]),
        )
        return Step(tuple(chunks), batch)

    def _tables(self, chunks: ListOf[Chunk], ends: Ints) -> Ints:
        """Return the pages that each chunk attends to: [chunks, widest], zero-padded."""
        used = -(-ends // self._block_size)
        pages: list[int] = []
        for chunk, count in zip(chunks, used.tolist(), strict=True):
            pages += chunk.sequence.pages[:count]
        tables = np.zeros((len(chunks), used.max()), np.int32)
        tables[np.arange(used.max()) < used[:, None]] = pages
        return tables

    def _sample_row(self, row: int, chunk: Chunk) -> SampleRow:
        sequence = chunk.sequence
        params = sequence.sampling
        assert params is not None
        banned: tuple[int, ...] = ()
        if params.min_tokens and sequence.answer_tokens < params.min_tokens:
            banned = self._eos + params.stop_token_ids
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        if params.has_penalties:
            prompt = tuple(sequence.known[: sequence.prompt_tokens])
            output = tuple(sequence.known[sequence.prompt_tokens :])
        return SampleRow(row, params, len(sequence.known), banned, prompt, output)
