"""Plans which requests are sent at which times: a pure, seeded function of the workload. No clock, no socket.

A prompt is planned as segments and spelled into token ids only when it is sent: a trace of 10^8 tokens stays small.
Equal segments spell equal tokens. The first token of a segment is its number, so different segments of a stream differ
from their first token on. So prompts share exactly what was asked for, as long as the vocabulary is larger than the
number of segments.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.bench.options import Prompts
from tools.simulate.traces.trace import Trace, TraceRow

RESERVED_IDS = 100
"""Lowest ids of most vocabularies are special tokens or bytes; prompts are drawn above."""
_COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door health "
    "person art war history party result change morning reason research girl guy moment air teacher force"
)
"""Words that are one token each in usual vocabularies, with the space before them."""
WORDS = tuple(_COMMON_WORDS.split())


class Stream(enum.IntEnum):
    """What a segment's number counts. It is also the part of the seed that separates the draws."""

    PREFIX = 1
    OWN = 2
    BLOCK = 3
    LENGTHS = 4
    GROUPS = 5
    ARRIVALS = 6
    WARMUP = 7
    PROBE = 8


@dataclass(frozen=True, slots=True)
class Segment:
    stream: Stream
    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    prompt: tuple[Segment, ...]
    output_tokens: int
    due_s: float | None
    """Seconds since the start of an open loop. None: it is sent as soon as a place is free."""

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)


@dataclass(frozen=True, slots=True)
class Speller:
    """Turns segments into token ids, or into words for servers that take text."""

    vocab_size: int
    seed: int

    def token_ids(self, prompt: Sequence[Segment]) -> list[int]:
        ids: list[int] = []
        for segment in prompt:
            ids += self._spell(segment)
        return ids

    def text(self, prompt: Sequence[Segment]) -> str:
        return " ".join(WORDS[token % len(WORDS)] for token in self.token_ids(prompt))

    def _spell(self, segment: Segment) -> list[int]:
        lowest = min(RESERVED_IDS, self.vocab_size // 4)
        draw = np.random.default_rng((self.seed, segment.stream, segment.number))
        ids: list[int] = draw.integers(lowest, self.vocab_size, segment.tokens).tolist()
        ids[:1] = [lowest + segment.number % (self.vocab_size - lowest)]
        return ids


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Returns seconds since the start. Gaps are exponential with mean 1/rate."""
    gaps = np.random.default_rng((seed, Stream.ARRIVALS)).exponential(1 / rate, count)
    arrivals: list[float] = np.cumsum(gaps).tolist()
    return arrivals


def constant_arrivals(rate: float, count: int) -> list[float]:
    return [index / rate for index in range(count)]


def arrivals_of(kind: str, rate: float | None, count: int, seed: int) -> Sequence[float | None]:
    """Returns the due times at `rate`, or none for a fixed concurrency."""
    if rate is None:
        return [None] * count
    return poisson_arrivals(rate, count, seed) if kind == "poisson" else constant_arrivals(rate, count)


def synthetic_plan(prompts: Prompts, due_s: Sequence[float | None]) -> list[PlannedRequest]:
    """Returns random prompts. Those of one group (drawn for each request) begin with the same shared tokens."""
    count, shared = len(due_s), prompts.shared_prefix_tokens
    lengths = np.random.default_rng((prompts.seed, Stream.LENGTHS)).integers(
        prompts.shortest, prompts.longest, count, endpoint=True
    )
    groups = np.random.default_rng((prompts.seed, Stream.GROUPS)).integers(0, prompts.prefix_groups, count)
    plan = []
    for index, (length, group) in enumerate(zip(lengths.tolist(), groups.tolist(), strict=True)):
        prefix = (Segment(Stream.PREFIX, group, shared),) if shared else ()
        own = Segment(Stream.OWN, index, length - shared)
        plan.append(PlannedRequest(index, (*prefix, own), prompts.output_tokens, due_s[index]))
    return plan


def even_plan(
    due_s: Sequence[float | None],
    tokens: tuple[int, int],
    *,
    prefix: tuple[Segment, ...] = (),
    stream: Stream = Stream.OWN,
    first: int = 0,
) -> list[PlannedRequest]:
    """Returns requests of equal length, which share `prefix`. `tokens`: tokens of each prompt after the prefix, and of
    each output. `first`: number of the first prompt in its stream.
    """
    prompt_tokens, output_tokens = tokens
    return [
        PlannedRequest(index, (*prefix, Segment(stream, first + index, prompt_tokens)), output_tokens, due)
        for index, due in enumerate(due_s)
    ]


def trace_plan(trace: Trace, due_s: Sequence[float | None]) -> list[PlannedRequest]:
    """Returns the rows of a replayed trace as requests."""
    return [
        PlannedRequest(index, _blocks(row, trace.block_tokens), row.output_tokens, due)
        for index, (row, due) in enumerate(zip(trace.rows, due_s, strict=True))
    ]


def warmup_plan(plan: Sequence[PlannedRequest], count: int) -> list[PlannedRequest]:
    """Returns requests as long as the planned ones, but with tokens that none of these has."""
    return [
        PlannedRequest(
            index,
            (Segment(Stream.OWN, len(plan) + index, plan[index % len(plan)].prompt_tokens),),
            plan[index % len(plan)].output_tokens,
            due_s=None,
        )
        for index in range(count)
    ]


def _blocks(row: TraceRow, block_tokens: int) -> tuple[Segment, ...]:
    *whole, last = row.blocks
    return (
        *(Segment(Stream.BLOCK, number, block_tokens) for number in whole),
        Segment(Stream.BLOCK, last, row.input_tokens - len(whole) * block_tokens),
    )
