"""Generates requests: seeded sessions whose turns share prefixes, as rows of a trace.

A session opens with one of the fleet's shared prefixes, and every further turn repeats what was said before. Lengths
are log-normal, as the tails of recorded ones are.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.simulate.traces.formats import MOONCAKE_BLOCK_TOKENS, TraceRow
from tools.simulate.traces.trace import Trace
from twostroke.base.errors import ConfigError

_SPAN = 1 << 32
"""Block numbers that one stretch of shared tokens may take."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal draw, cut at both ends."""

    median: float
    sigma: float = 0.0
    most: float = math.inf

    def draw(self, draws: random.Random) -> float:
        return min(self.most, max(1.0, self.median * math.exp(self.sigma * draws.gauss(0.0, 1.0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPattern:
    """How the sessions of a workload go."""

    common_tokens: int = 0
    """Every prompt begins with the same ones."""
    prefixes: int = 1
    """Shared ones that follow; which one a session has, Zipf's law draws."""
    prefix_tokens: LogNormal = LogNormal(0.0)
    popularity: float = 1.0
    """Zipf's exponent; 0: all prefixes alike."""
    opening_tokens: LogNormal
    """Tokens of a session's first prompt after its prefix."""
    turn_tokens: LogNormal = LogNormal(0.0)
    """What every further prompt adds to the answer before it."""
    answer_tokens: LogNormal
    turns: float = 1.0
    """On average; geometric."""
    pause_s: LogNormal = LogNormal(1.0)
    """From one request of a session to the next."""
    most_input_tokens: int = 128_000


WORKLOADS = {
    "conversation": SessionPattern(
        common_tokens=512,
        prefixes=40,
        prefix_tokens=LogNormal(400, 0.8, 8_000),
        opening_tokens=LogNormal(5_000, 1.2, 120_000),
        turn_tokens=LogNormal(900, 1.2, 60_000),
        answer_tokens=LogNormal(290, 0.6, 2_000),
        turns=1.6,
        pause_s=LogNormal(110, 1.1, 1_800),
    ),
    "prefix-groups": SessionPattern(
        prefixes=150,
        prefix_tokens=LogNormal(6_000),
        popularity=0.0,
        opening_tokens=LogNormal(1_200),
        answer_tokens=LogNormal(1_000),
    ),
    "code-agent": SessionPattern(
        common_tokens=3_072,
        prefixes=25,
        prefix_tokens=LogNormal(9_000, 0.9, 60_000),
        opening_tokens=LogNormal(500, 0.8, 8_000),
        turn_tokens=LogNormal(600, 1.3, 20_000),
        answer_tokens=LogNormal(150, 0.9, 2_000),
        turns=10.0,
        pause_s=LogNormal(6.0, 0.9, 300),
    ),
}
"""Generated workloads, by name.

conversation: lengths, pauses and reuse as in Mooncake's recorded conversations (mean input 12k, output 340 tokens, a
third of the input said before; FAST'25).
prefix-groups: 150 groups of 6000 + 1200 tokens, as llm-d's "b2b-saas" benchmark.
code-agent: few long system prompts and many quick turns, as inference-perf's code generation."""


MOST_WARM_SESSIONS = 200_000
"""Sessions before the first request; some seconds of drawing them."""


def workload_named(name: str) -> SessionPattern:
    if name not in WORKLOADS:
        raise ConfigError(f"--workload must be one of {', '.join(WORKLOADS)}; got {name!r}", field="workload")
    return WORKLOADS[name]


def generated(name: str, requests: int, rate: float, seed: int) -> Trace:
    """Generates `requests` rows at `rate` per second on average. Sessions have been running before the first row."""
    pattern = workload_named(name)
    if requests < 1:
        raise ConfigError(f"--limit must be 1 or more, got {requests}", field="limit")
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate must be positive and finite, got {rate}", field="rate")
    warm_s = pattern.pause_s.median * (pattern.turns - 1) * 2
    warm_sessions = rate * warm_s / pattern.turns
    if warm_sessions > MOST_WARM_SESSIONS:
        raise ConfigError(
            f"--rate {rate:g} is too high for {name}: {warm_sessions:.3g} sessions would begin before its first "
            f"request; {MOST_WARM_SESSIONS:,} are the most",
            field="rate",
        )
    coming = (row for row in _in_order(_Sessions(pattern, rate, seed)) if row.timestamp_s >= warm_s)
    rows = tuple(itertools.islice(coming, requests))
    return Trace(name, MOONCAKE_BLOCK_TOKENS, rows)


class _Sessions:
    """Iterates over sessions by their begin; each is the list of its rows."""

    def __init__(self, pattern: SessionPattern, rate: float, seed: int) -> None:
        self._pattern = pattern
        self._draws = random.Random(f"workload {seed}")
        self._sessions_per_s = rate / pattern.turns
        self._prefix_tokens = [int(pattern.prefix_tokens.draw(self._draws)) for _ in range(pattern.prefixes)]
        weights = (1 / (number + 1) ** pattern.popularity for number in range(pattern.prefixes))
        self._weights = list(itertools.accumulate(weights))
        self._own = itertools.count(1)

    def __iter__(self) -> Iterator[list[TraceRow]]:
        begin_s = 0.0
        while True:
            begin_s += self._draws.expovariate(self._sessions_per_s)
            yield list(self._session(begin_s))

    def _session(self, at_s: float) -> Iterator[TraceRow]:
        pattern, draws = self._pattern, self._draws
        prefix = draws.choices(range(pattern.prefixes), cum_weights=self._weights)[0]
        shared = pattern.common_tokens + self._prefix_tokens[prefix]
        session = next(self._own)
        tokens = shared + int(pattern.opening_tokens.draw(draws))
        while tokens <= pattern.most_input_tokens:
            answer = int(pattern.answer_tokens.draw(draws))
            yield TraceRow(at_s, tokens, answer, self._blocks(tokens, prefix, session))
            if draws.random() >= 1 - 1 / pattern.turns:
                return
            tokens += answer + int(pattern.turn_tokens.draw(draws))
            at_s += pattern.pause_s.draw(draws)

    def _blocks(self, tokens: int, prefix: int, session: int) -> tuple[int, ...]:
        """Returns the blocks. One that two stretches share belongs to the later one, a part of one to this request."""
        size = MOONCAKE_BLOCK_TOKENS
        full = tokens // size
        common = min(full, self._pattern.common_tokens // size)
        shared = max(common, min(full, (self._pattern.common_tokens + self._prefix_tokens[prefix]) // size))
        first_own = (self._pattern.prefixes + session) * _SPAN
        blocks = [*range(common), *range((1 + prefix) * _SPAN + common, (1 + prefix) * _SPAN + shared)]
        blocks += range(first_own + shared, first_own + full)
        if tokens % size:
            blocks.append((self._pattern.prefixes + next(self._own)) * _SPAN)
        return tuple(blocks)


def _in_order(sessions: _Sessions) -> Iterator[TraceRow]:
    """Yields all rows by time: those of sessions that have begun, as far as no session to come can be earlier."""
    waiting: list[tuple[float, int, TraceRow]] = []
    numbers = itertools.count()
    for session in sessions:
        if not session:
            continue
        begin_s = session[0].timestamp_s
        while waiting and waiting[0][0] <= begin_s:
            yield heapq.heappop(waiting)[2]
        for row in session:
            heapq.heappush(waiting, (row.timestamp_s, next(numbers), row))
