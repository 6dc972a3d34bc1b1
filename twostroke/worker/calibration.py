"""What steps cost, measured before a worker serves: a short sweep through the real runner.

Nothing of it can be seen afterwards: every token is written to the scratch page, pages of the pool are only read (they
belong to nobody yet), and tokens are the likeliest ones, so nothing is drawn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twostroke.engine.loop import EngineThread
from twostroke.request import SamplingParams
from twostroke.schedule.batch import Batch, SampleRow
from twostroke.schedule.cost import StepTerms
from twostroke.worker.rates import Rates

LONG_CONTEXT = 2048
"""Tokens; what is attended to costs about as much as the rest of a small model from there on."""
MANY_STREAMS = 8
LIKELIEST = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Effort:
    budget_s: float
    """Of a worker's start. One step of each kind is run however long it takes."""
    warms_up: bool
    """The first step of a kind takes memory and wakes threads: it is run once more, and only that counts."""


COMPUTED = Effort(0.45, warms_up=True)
PACED = Effort(0.1, warms_up=False)
"""Where steps are only waits, each says all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What steps can be made of."""

    step_tokens: int
    max_model_len: int
    max_sequences: int
    pages: int
    block_size: int
    samples: bool

    @property
    def longest(self) -> int:
        """Tokens of one sequence."""
        return min(self.max_model_len, self.pages * self.block_size)


async def calibrate(engine: EngineThread, rates: Rates, reach: Reach, effort: Effort) -> None:
    """Let `rates` see steps of all sizes."""
    end_s = time.monotonic() + effort.budget_s
    kinds_seen: set[bool] = set()
    for batch in sweep(reach):
        terms = StepTerms.of(batch)
        is_prompt = terms.prompt_tokens > 0
        if is_prompt in kinds_seen and time.monotonic() + rates.cost.of(terms) > end_s:
            continue
        if is_prompt not in kinds_seen and effort.warms_up:
            await engine.start(batch)
        result = await engine.start(batch)
        rates.observe(terms, result.seconds)
        kinds_seen.add(is_prompt)


def sweep(reach: Reach) -> Iterator[Batch]:
    """Steps that tell all terms of a step's cost apart; those that say most come first."""
    most = min(reach.step_tokens, reach.longest)
    few, some = min(most, reach.block_size), -(-most // 2)
    chunks = [(few, 0), (some, 0), (some, LONG_CONTEXT), (most, 0), (few, LONG_CONTEXT), (most, LONG_CONTEXT)]
    prompts = (_chunk(reach, tokens, min(context, reach.longest - tokens)) for tokens, context in chunks)
    if not reach.samples:
        yield from prompts
        return
    many = min(MANY_STREAMS, reach.max_sequences, reach.step_tokens)
    rows = [(1, few), (many, few), (many, LONG_CONTEXT), (1, LONG_CONTEXT)]
    streams = (_streams(reach, count, min(context, reach.longest)) for count, context in rows)
    for pair in itertools.zip_longest(streams, prompts):
        yield from (batch for batch in pair if batch is not None)


def _chunk(reach: Reach, tokens: int, context: int) -> Batch:
    """Of one prompt, with `context` tokens before it."""
    positions = np.arange(context, context + tokens, dtype=np.int32)
    return Batch(
        tokens=np.zeros(tokens, np.int32),
        positions=positions,
        query_starts=np.array([0, tokens], np.int32),
        context_lens=np.array([context + tokens], np.int32),
        block_tables=_tables(reach, 1, context + tokens),
        write_slots=_scratch_slots(reach, positions),
    )


def _streams(reach: Reach, count: int, context: int) -> Batch:
    positions = np.full(count, context - 1, np.int32)
    return Batch(
        tokens=np.zeros(count, np.int32),
        positions=positions,
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, context, np.int32),
        block_tables=_tables(reach, count, context),
        write_slots=_scratch_slots(reach, positions),
        samples=tuple(SampleRow(row, LIKELIEST, context) for row in range(count)),
    )


def _tables(reach: Reach, rows: int, context: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Pages of its own for every row, as far as there are any: what is read comes from memory, not from a cache."""
    blocks = -(-context // reach.block_size)
    return (np.arange(rows * blocks, dtype=np.int32) % reach.pages).reshape(rows, blocks)


def _scratch_slots(
    reach: Reach, positions: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return reach.pages * reach.block_size + positions.astype(np.int64) % reach.block_size
