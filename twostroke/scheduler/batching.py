"""The batch builder turns chosen token ranges into the arrays of a Batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twostroke.base.ids import PageId
from twostroke.base.token_mask import mask_of
from twostroke.scheduler.batch import Batch, FeatureRows, GroupPlaces, SampleRow
from twostroke.scheduler.cost import StepTerms
from twostroke.scheduler.sequence import Sequence

Ints = npt.NDArray[np.int32]


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence that a step runs. If `samples`, it draws the next token after the last one.

    Proposed tokens run after it, and the next token after each of them is drawn too. It is a tuple because one is made
    for every token.
    """

    sequence: Sequence
    start: int
    end: int
    samples: bool
    proposed: tuple[int, ...] = ()

    @property
    def run_end(self) -> int:
        return self.end + len(self.proposed)


new_chunk: Callable[[tuple[Sequence, int, int, bool, tuple[int, ...]]], Chunk] = partial(tuple.__new__, Chunk)
_sample_row: Callable[[tuple[object, ...]], SampleRow] = partial(tuple.__new__, SampleRow)
"""These make a tuple three times as fast as its class, whose `__new__` is written in Python."""


def terms_of(chunks: ListOf[Chunk]) -> StepTerms:
    """Returns the quantities that the cost of a step of these chunks depends on, without logprobs of prompts."""
    streams = context_tokens = prompt_tokens = 0
    pairs = 0.0
    for chunk in chunks:
        end = chunk.end
        if chunk.samples:
            streams += 1 + len(chunk.proposed)
            context_tokens += end
            end -= 1
        tokens = end - chunk.start
        prompt_tokens += tokens
        pairs += tokens * (chunk.start + tokens / 2)
    return StepTerms(streams, context_tokens, prompt_tokens, pairs)


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]
    batch: Batch


class StepBuilder(Protocol):
    def build(self, chunks: ListOf[Chunk]) -> Step:
        """Returns the step that runs `chunks` in this order."""


class _Places(NamedTuple):
    """The fields of a Batch for the positions of its tokens, and for the places of their keys and values."""

    positions: Ints
    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    write_slots: npt.NDArray[np.int64]
    further: tuple[GroupPlaces, ...] = ()


class FurtherPlaces:
    """Finds where a step reads and writes in further page groups. The base class is for models without any."""

    has_any = False

    def kept_tokens(self, chunks: ListOf[Chunk], computed: Ints) -> Ints:
        """Returns how many leading tokens of each sequence are in filled pages: these are not written again."""
        return computed

    def of(
        self, chunks: ListOf[Chunk], positions: Ints, rows: npt.NDArray[np.int64], computed: Ints, ends: Ints
    ) -> tuple[GroupPlaces, ...]:
        """Returns the pages that each chunk attends to, and where it writes, in each further group."""
        return ()


class BatchBuilder:
    def __init__(
        self,
        block_size: int,
        scratch_page: int,
        eos_token_ids: tuple[int, ...],
        further: FurtherPlaces | None = None,
    ) -> None:
        """`further`: the places in the groups beside the first one."""
        self._further = further or FurtherPlaces()
        self._block_size = block_size
        self._offsets = np.arange(block_size, dtype=np.int64)
        self._scratch_slot = scratch_page * block_size
        self._eos = eos_token_ids
        self._pages: list[list[PageId]] = []
        """Pages of each sequence of the step before: the lists themselves, which only grow."""
        self._used = np.zeros(0, np.int32)
        self._tables_before = np.zeros((0, 0), np.int32)

    def build(self, chunks: ListOf[Chunk]) -> Step:
        is_one = len(chunks) == 1 and not self._further.has_any
        places = self._places_of_one(chunks[0]) if is_one else self._places(chunks)
        tokens: list[int] = []
        for sequence, start, end, _, proposed in chunks:
            tokens += sequence.known[start:end]
            tokens += proposed
        features = self._features(chunks)
        batch = Batch(
            tokens=np.frombuffer(array("i", tokens), np.int32),  # three times as fast as np.array
            positions=places.positions,
            query_starts=places.query_starts,
            context_lens=places.context_lens,
            block_tables=places.block_tables,
            write_slots=places.write_slots,
            samples=tuple(
                [
                    sample
                    for row, each in enumerate(chunks)
                    if each.samples
                    for sample in self._samples(row, each, features)
                ]
            ),
            scores=tuple(features.scores),
            weights=tuple(map(features.weights.get, range(len(chunks)))) if features.weights else (),
            further=places.further,
        )
        return Step(tuple(chunks), batch)

    def _places_of_one(self, chunk: Chunk) -> _Places:
        """Returns what `_places` does for a step of one chunk, as prefill workers mostly run them."""
        size, start, end, computed = self._block_size, chunk.start, chunk.run_end, chunk.sequence.computed
        table = self._table_of(chunk.sequence.pages, -(-end // size))
        first = start // size
        slots = (table[0, first:].astype(np.int64)[:, None] * size + self._offsets).ravel()
        slots = slots[start - first * size : end - first * size]
        slots[: max(0, computed - start)] = self._scratch_slot
        lengths, positions = np.array((0, end - start), np.int32), np.arange(start, end, dtype=np.int32)
        return _Places(positions, lengths, np.array((end,), np.int32), table, slots)

    def _table_of(self, pages: list[PageId], used: int) -> Ints:
        table, before, known = np.empty((1, used), np.int32), self._tables_before, 0
        if len(self._pages) == 1 and self._pages[0] is pages and before.shape[1] <= used:
            known = before.shape[1]
            table[0, :known] = before[0]
        table[0, known:] = pages[known:used]
        self._pages, self._used, self._tables_before = [pages], np.array((used,), np.int32), table
        return table

    def _places(self, chunks: ListOf[Chunk]) -> _Places:
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        ends = np.array([chunk.run_end for chunk in chunks], np.int32)
        computed = np.array([chunk.sequence.computed for chunk in chunks], np.int32)
        lengths = ends - starts
        query_starts = np.zeros(len(chunks) + 1, np.int32)
        lengths.cumsum(out=query_starts[1:])
        tables = self._tables(chunks, ends)
        if len(chunks) == query_starts[-1]:
            rows, positions = np.arange(len(chunks)), starts
        else:
            rows = np.arange(len(chunks)).repeat(lengths)
            positions = np.arange(len(rows), dtype=np.int32) + (starts - query_starts[:-1])[rows]
        blocks, offsets = np.divmod(positions, np.int32(self._block_size))
        slots = tables[rows, blocks].astype(np.int64) * self._block_size + offsets
        kept = self._further.kept_tokens(chunks, computed)
        if (starts < kept).any():
            slots[positions < kept[rows]] = self._scratch_slot  # computed tokens are not written again
        further = self._further.of(chunks, positions, rows, computed, ends)
        return _Places(positions, query_starts, ends, tables, slots, further)

    def _tables(self, chunks: ListOf[Chunk], ends: Ints) -> Ints:
        """Returns the pages that each chunk attends to: [chunks, widest], zero-padded."""
        used, pages = -(-ends // self._block_size), [chunk.sequence.pages for chunk in chunks]
        width = int(used.max())
        tables = np.zeros((len(chunks), width), np.int32)
        if len(pages) == len(self._pages) and all(map(is_, pages, self._pages)) and (used >= self._used).all():
            tables[:, : self._tables_before.shape[1]] = self._tables_before
            known = self._used
        else:
            known = np.zeros(len(chunks), np.int32)
        for row in np.flatnonzero(used > known).tolist():
            tables[row, known[row] : used[row]] = pages[row][known[row] : used[row]]
        self._pages, self._used, self._tables_before = pages, used, tables
        return tables

    def _features(self, chunks: ListOf[Chunk]) -> FeatureRows:
        rows = FeatureRows(self._eos)
        for row, (sequence, start, end, _, proposed) in enumerate(chunks):
            for constraint in sequence.constraints:
                constraint.fill(rows, row, sequence, range(start, end), proposed)
        return rows

    def _samples(self, row: int, chunk: Chunk, features: FeatureRows) -> list[SampleRow]:
        """Returns the draws of a sequence: after its last known token, and after each proposed one.

        Each row is made as if the proposed tokens before it were known.
        """
        sequence, proposed = chunk.sequence, chunk.proposed
        if not chunk.samples:
            return []
        params = sequence.sampling
        assert params is not None
        is_early = params.min_tokens > sequence.answer_tokens
        if not (proposed or is_early or features.masks or params.has_penalties or params.allowed_tokens):  # usually
            return [_sample_row((row, params, len(sequence.known), (), (), (), None, 0))]
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        if params.has_penalties:
            prompt = tuple(sequence.known[: sequence.prompt_tokens])
            output = tuple(sequence.known[sequence.prompt_tokens :]) + proposed
        masks = features.masks.get(row)
        allowed = mask_of(params.allowed_tokens) if params.allowed_tokens else None
        known, answered, samples = len(sequence.known), sequence.answer_tokens, []
        for drawn in range(len(proposed) + 1):
            is_early = answered + drawn < params.min_tokens
            banned = self._eos + params.stop_token_ids if is_early else ()
            so_far = output[: answered + drawn] if proposed else output
            mask = allowed if masks is None else masks[drawn]
            behind = len(proposed) - drawn
            samples.append(SampleRow(row, params, known + drawn, banned, prompt, so_far, mask, behind))
        return samples
