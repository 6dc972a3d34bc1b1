"""Recorded traces: Mooncake-format JSON lines {timestamp (ms), input_length, output_length, hash_ids[]}."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
"""Tokens behind one hash id, fixed by the format."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    """One per started block of `input_length`; equal ids, equal tokens."""


def read_trace(path: Path, limit: int | None = None) -> tuple[TraceRow, ...]:
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_trace(lines, str(path), limit)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}", field="trace") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {path}: not UTF-8 text", field="trace") from error


def parse_trace(lines: Iterable[str], name: str, limit: int | None = None) -> tuple[TraceRow, ...]:
    """The first `limit` rows. Raises ConfigError naming line and field of the first malformed one."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    rows = tuple(_parse_row(line, f"{name}:{number}") for number, line in islice(numbered, limit))
    if not rows:
        raise ConfigError(f"{name}: no rows", field="trace")
    return rows


def _parse_row(line: str, where: str) -> TraceRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}", field="trace") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be an object, got {type(row).__name__}", field="trace")
    timestamp = _field(row, "timestamp", where)
    if not _is_number(timestamp) or not math.isfinite(timestamp) or timestamp < 0:
        raise _malformed(where, "timestamp", "a number of milliseconds from 0 on", timestamp)
    return TraceRow(
        timestamp_s=timestamp / 1000,
        input_length=(input_length := _count(row, "input_length", where)),
        output_length=_count(row, "output_length", where),
        hash_ids=_hash_ids(row, input_length, where),
    )


def _count(row: dict[str, Any], field: str, where: str) -> int:
    value = _field(row, field, where)
    if not _is_integer(value) or value < 1:
        raise _malformed(where, field, "a positive integer", value)
    return int(value)


def _hash_ids(row: dict[str, Any], input_length: int, where: str) -> tuple[int, ...]:
    value = _field(row, "hash_ids", where)
    if not isinstance(value, list) or not all(_is_integer(each) and each >= 0 for each in value):
        raise _malformed(where, "hash_ids", "a list of integers from 0 on", value)
    needed = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(value) != needed:
        wanted = f"{needed} long for an input_length of {input_length} ({TRACE_BLOCK_TOKENS} tokens each)"
        raise _malformed(where, "hash_ids", wanted, f"{len(value)} entries")
    return tuple(value)


def _field(row: dict[str, Any], field: str, where: str) -> Any:
    if field not in row:
        raise ConfigError(f"{where}: {field} is missing", field=field)
    return row[field]


def _malformed(where: str, field: str, requirement: str, value: object) -> ConfigError:
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:60] + "..."
    return ConfigError(f"{where}: {field} must be {requirement}, got {shown}", field=field)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
