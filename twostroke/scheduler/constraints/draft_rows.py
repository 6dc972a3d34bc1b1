"""Steps of a draft model: the tokens that it lacks of each answer, and then one drafted token after another.

Its pages are private to a worker: no block of them has a hash, and only its own steps read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from twostroke.base.ids import PageId
from twostroke.base.token_mask import mask_of
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import Batch, SampleRow


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a draft model computes of one answer."""

    tokens: tuple[int, ...]
    """Known tokens that it lacks, at least one."""
    start: int
    """Position of the first of them."""
    pages: tuple[PageId, ...]
    """Room for them, and for all drafted tokens but the last, which is not computed."""
    params: SamplingParams
    """How its tokens are drawn."""
    length: int
    """Number of tokens to draft after them; 0 where it only catches up."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def draft_params(params: SamplingParams) -> SamplingParams:
    """Returns how a draft model draws: with the noise of the answer, so that both draw the same where they agree.

    It leaves out what depends on the answer's earlier tokens, and logprobs, which are not used.
    """
    return replace(
        params,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=None,
        logprob_token_ids=(),
        prompt_logprobs=None,
        min_tokens=0,
        grammar=None,
    )


def first_batch(rows: Sequence[DraftRow], block_size: int) -> Batch:
    """Returns the step in which all rows catch up, and those that draft draw their first token."""
    return _batch([(row, row.start, row.tokens) for row in rows], block_size, drawn_number=1)


def next_batch(rows: Sequence[DraftRow], drafted: Sequence[Sequence[int]], block_size: int) -> Batch:
    """Returns the step that runs the last drafted token of each row and draws the next one.

    All rows have equally many drafted tokens.
    """
    count = len(drafted[0])
    chosen = [(row, row.end + count - 1, (own[-1],)) for row, own in zip(rows, drafted, strict=True)]
    return _batch(chosen, block_size, drawn_number=count + 1)


def _batch(chosen: Sequence[tuple[DraftRow, int, tuple[int, ...]]], block_size: int, *, drawn_number: int) -> Batch:
    """Returns the batch. `drawn_number`: which drafted token it draws, from 1. Rows with shorter drafts draw none."""
    starts = np.array([start for _, start, _ in chosen], np.int32)
    lengths = np.array([len(tokens) for _, _, tokens in chosen], np.int32)
    ends = starts + lengths
    query_starts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    rows = np.repeat(np.arange(len(chosen)), lengths)
    positions = np.arange(len(rows), dtype=np.int32) + (starts - query_starts[:-1])[rows]
    used = -(-ends // block_size)
    tables = np.zeros((len(chosen), int(used.max())), np.int32)
    for number, (row, _, _) in enumerate(chosen):
        tables[number, : used[number]] = row.pages[: used[number]]
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        tokens=np.array([token for _, _, tokens in chosen for token in tokens], np.int32),
        positions=positions,
        query_starts=query_starts,
        context_lens=ends,
        block_tables=tables,
        write_slots=slots,
        samples=tuple(
            SampleRow(number, row.params, int(end), mask=mask_of(row.params.allowed_tokens))
            for number, ((row, _, _), end) in enumerate(zip(chosen, ends.tolist(), strict=True))
            if row.length >= drawn_number
        ),
    )
