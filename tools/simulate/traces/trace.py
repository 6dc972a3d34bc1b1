"""Recorded requests, whatever recorded them: Mooncake's JSON lines, Azure's CSV files, and our own request log.

A row names its blocks by numbers: equal numbers, equal tokens. What a format is, its first line tells.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tools.simulate.traces.formats import TraceRow, format_of, lines_of
from twostroke.base.errors import ConfigError

__all__ = ["Replay", "Trace", "TraceRow", "parse_trace", "read_trace", "replayed"]


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    """Tokens that each number stands for, but the last one of a row, which stands for what is left."""
    rows: tuple[TraceRow, ...]
    """Rows as they were recorded: `replayed` puts them in order."""
    repeats_answers: bool = False
    """Whether a row that begins with all blocks of an earlier one continues with the answer to that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a trace is played. The defaults play raw bursts at the recorded pace."""

    jitter_s: float = 0.0
    """Every row comes later by a uniform draw from 0 to this: Mooncake's times are buckets of 3 s."""
    time_scale: float = 1.0
    """0.5: twice as fast."""
    length_scale: float = 1.0
    """Shrinks prompts, answers and blocks alike, so that rows share what they shared."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter_s < float("inf"):
            raise ConfigError(f"a trace's jitter must be 0 s or more, got {self.jitter_s}", field="jitter_s")
        for name, scale in (("time_scale", self.time_scale), ("length_scale", self.length_scale)):
            if not 0 < scale < float("inf"):
                raise ConfigError(f"a trace's {name} must be positive and finite, got {scale}", field=name)


def read_trace(path: Path, limit: int | None = None) -> Trace:
    return parse_trace(lines_of(path, "--trace"), str(path), limit)


def parse_trace(lines: Iterable[str], name: str, limit: int | None = None) -> Trace:
    """Returns the first `limit` rows. Raises ConfigError naming line and field of the first malformed one."""
    numbered = _numbered(lines)
    first = next(numbered, None)
    if first is None:
        raise ConfigError(f"{name}: no rows", field="trace")
    shape = format_of(first[1], f"{name}:{first[0]}")
    rest = numbered if shape.first_is_header else itertools.chain([first], numbered)
    located = ((f"{name}:{number}", line) for number, line in rest)
    rows = tuple(itertools.islice((row for where, line in located if (row := shape.row(line, where))), limit))
    if not rows:
        raise ConfigError(f"{name}: no rows", field="trace")
    return Trace(name, shape.block_tokens, rows, shape.repeats_answers)


def replayed(trace: Trace, replay: Replay) -> Trace:
    """Returns the rows in the order in which they come, the first one at 0 s."""
    draws = random.Random(f"trace jitter {replay.seed}")
    times_s = [row.timestamp_s + replay.jitter_s * draws.random() for row in trace.rows]
    begin_s = min(times_s)
    block_tokens = max(1, round(trace.block_tokens * replay.length_scale))
    rows = (
        replace(
            row,
            timestamp_s=(time_s - begin_s) * replay.time_scale,
            input_tokens=_scaled_input(row, trace.block_tokens, block_tokens),
            output_tokens=max(1, round(row.output_tokens * replay.length_scale)),
        )
        for time_s, row in zip(times_s, trace.rows, strict=True)
    )
    in_order = tuple(sorted(rows, key=lambda row: row.timestamp_s))
    return replace(trace, block_tokens=block_tokens, rows=in_order)


def _scaled_input(row: TraceRow, recorded_block: int, block: int) -> int:
    """Returns the scaled input: blocks scale alike, so rows share what they shared, and none loses its last token."""
    whole = len(row.blocks) - 1
    tail = row.input_tokens - whole * recorded_block
    return whole * block + max(1, round(tail * block / recorded_block))


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip())
