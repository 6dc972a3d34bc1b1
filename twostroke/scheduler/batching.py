"""The batch builder turns chosen token ranges into the arrays of a Batch."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twostroke.scheduler.batch import Batch, SampleRow
from twostroke.scheduler.sequence import Sequence


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
        lengths = [chunk.end - chunk.start for chunk in chunks]
        positions = np.concatenate([np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in chunks])
        widest = max(-(-chunk.end // self._block_size) for chunk in chunks)
        tables = np.zeros((len(chunks), widest), np.int32)
        slots: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for row, chunk in enumerate(chunks):
            used = -(-chunk.end // self._block_size)
            tables[row, :used] = chunk.sequence.pages[:used]
            slots.append(self._slots(chunk, tables[row]))
        batch = Batch(
            tokens=np.concatenate(
                [np.asarray(chunk.sequence.known[chunk.start : chunk.end], np.int32) for chunk in chunks]
            ),
            positions=positions,
            query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_lens=np.asarray([chunk.end for chunk in chunks], np.int32),
            block_tables=tables,
            write_slots=np.concatenate(slots),
            samples=tuple(self._sample_row(row, chunk) for row, chunk in enumerate(chunks) if chunk.samples),
        )
        return Step(tuple(chunks), batch)

    def _slots(
        self, chunk: Chunk, table: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return where each token's KV goes; computed tokens are not written again."""
        positions = np.arange(chunk.start, chunk.end, dtype=np.int64)
        slots = table[positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size
        slots[positions < chunk.sequence.computed] = self._scratch_slot
        return slots

    def _sample_row(self, row: int, chunk: Chunk) -> SampleRow:
        sequence = chunk.sequence
        params = sequence.sampling
        assert params is not None
        banned: tuple[int, ...] = ()
        if sequence.answer_tokens < params.min_tokens:
            banned = self._eos + params.stop_token_ids
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        if params.has_penalties:
            prompt = tuple(sequence.known[: sequence.prompt_tokens])
            output = tuple(sequence.known[sequence.prompt_tokens :])
        return SampleRow(row, params, len(sequence.known), banned, prompt, output)
