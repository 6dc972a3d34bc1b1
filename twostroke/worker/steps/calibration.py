"""Calibration measures what steps cost before a worker serves, by a short sweep through the real runner.

It changes no page of the pool: tokens are written to the scratch page, pool pages are only read, and sampling is
greedy.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from twostroke.request import SamplingParams
from twostroke.scheduler.batch import Batch, SampleRow
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.worker.branches import StepStarter
from twostroke.worker.measured.rates import Rates

LONG_CONTEXT = 2048
"""Context length, in tokens, from which attention costs about as much as the rest of a small model."""
MANY_STREAMS = 8
MOST_STEP_TOKENS = 512
"""Most prompt tokens of a step: larger steps are hardly faster per token."""
LONGEST_STEP_S = 0.3
"""Most seconds of a step of prompt tokens: arriving prompts wait for it, and so do streams whose pages arrive."""
GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class SweepBudget:
    budget_s: float
    """Seconds for the sweep. One prompt step and one decode step run, however long they take."""
    warms_up: bool
    """Whether the first step of each kind runs twice: the first run allocates memory and starts threads, so only the
    second counts."""


COMPUTED_BUDGET = SweepBudget(0.45, warms_up=True)
PACED_BUDGET = SweepBudget(0.1, warms_up=False)
"""For paced models: their steps are only waits, so few suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationLimits:
    """The largest steps that this worker can run."""

    step_tokens: int
    max_model_len: int
    max_sequences: int
    pages: int
    block_size: int
    runs_decode: bool
    placed: Callable[[Batch], Batch] | None = None
    """Gives a step that belongs to no sequence its places in further page groups. None: there are none."""

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return min(self.max_model_len, self.pages * self.block_size)


async def calibrate(engine: StepStarter, rates: Rates, limits: CalibrationLimits, budget: SweepBudget) -> None:
    """Lets `rates` observe steps of all sizes."""
    end_s = time.monotonic() + budget.budget_s
    kinds_seen: set[bool] = set()
    for batch in sweep(limits):
        terms = StepTerms.of(batch)
        is_prompt = terms.prompt_tokens > 0
        if is_prompt in kinds_seen and time.monotonic() + rates.cost.of(terms) > end_s:
            continue
        if is_prompt not in kinds_seen and budget.warms_up:
            await engine.start(batch)
        result = await engine.start(batch)
        rates.observe(terms, result.seconds)
        kinds_seen.add(is_prompt)


def step_tokens_within(cost: StepCost, least: int) -> int:
    """Returns `least`, doubled as often as a step with the first tokens of a prompt takes at most LONGEST_STEP_S.

    Threads wait for each other at the end of every kernel, and between steps: few long steps lose less time than many
    short ones.
    """
    tokens = least
    while 2 * tokens <= MOST_STEP_TOKENS and 0 < cost.of_prompt(2 * tokens, 0, 2 * tokens) <= LONGEST_STEP_S:
        tokens *= 2
    return tokens


def sweep(limits: CalibrationLimits) -> Iterator[Batch]:
    """Yields steps from which every term of the step cost can be fitted, the most informative first.

    Each gives up the blocks that the one before it has begun.
    """
    released: tuple[int, ...] = ()
    for step in _steps(limits):
        batch = replace(step, released=released)
        yield batch if limits.placed is None else limits.placed(batch)
        rows = np.repeat(np.arange(batch.sequences), np.diff(batch.query_starts))
        released = tuple(set(batch.block_tables[rows, batch.positions // limits.block_size].tolist()))


def _steps(limits: CalibrationLimits) -> Iterator[Batch]:
    most = min(limits.step_tokens, limits.longest)
    few, some = min(most, limits.block_size), -(-most // 2)
    chunks = [(few, 0), (some, 0), (some, LONG_CONTEXT), (most, 0), (few, LONG_CONTEXT), (most, LONG_CONTEXT)]
    prompts = (_chunk(limits, tokens, min(context, limits.longest - tokens)) for tokens, context in chunks)
    if not limits.runs_decode:
        yield from prompts
        return
    many = min(MANY_STREAMS, limits.max_sequences, limits.step_tokens)
    rows = [(1, few), (many, few), (many, LONG_CONTEXT), (1, LONG_CONTEXT)]
    streams = (_streams(limits, count, min(context, limits.longest)) for count, context in rows)
    for pair in itertools.zip_longest(streams, prompts):
        yield from (batch for batch in pair if batch is not None)


def _chunk(limits: CalibrationLimits, tokens: int, context: int) -> Batch:
    """Returns a step of one prompt chunk with `context` tokens before it."""
    positions = np.arange(context, context + tokens, dtype=np.int32)
    return Batch(
        tokens=np.zeros(tokens, np.int32),
        positions=positions,
        query_starts=np.array([0, tokens], np.int32),
        context_lens=np.array([context + tokens], np.int32),
        block_tables=_tables(limits, 1, context + tokens),
        write_slots=_scratch_slots(limits, positions),
    )


def _streams(limits: CalibrationLimits, count: int, context: int) -> Batch:
    positions = np.full(count, context - 1, np.int32)
    return Batch(
        tokens=np.zeros(count, np.int32),
        positions=positions,
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, context, np.int32),
        block_tables=_tables(limits, count, context),
        write_slots=_scratch_slots(limits, positions),
        samples=tuple(SampleRow(row, GREEDY, context) for row in range(count)),
    )


def _tables(limits: CalibrationLimits, rows: int, context: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Gives every row pages of its own where possible, so that they are read from memory and not from a CPU cache."""
    blocks = -(-context // limits.block_size)
    return (np.arange(rows * blocks, dtype=np.int32) % limits.pages).reshape(rows, blocks)


def _scratch_slots(
    limits: CalibrationLimits, positions: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return limits.pages * limits.block_size + positions.astype(np.int64) % limits.block_size
