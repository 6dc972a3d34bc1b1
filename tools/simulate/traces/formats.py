"""One line of a trace to one row, for each format that is read, the router's request log among them.

An error names line and field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from twostroke.base.errors import ConfigError
from twostroke.base.json_values import from_values
from twostroke.observability.request_log import LOGGED_HASH_BYTES, AnswerRecord, Record, WorkerRecord

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one hash id stands for, fixed by the format."""
AZURE_BLOCK_TOKENS = 512
"""The format has no blocks; any size will do, as none is shared."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 10**8
"""Most tokens of one prompt or answer; more is a mistake, and would not fit into memory."""
MAX_TIMESTAMP_MS = 10**15
"""Thirty thousand years; more is a mistake."""
OWN_NUMBERS = 1 << 64
"""From here on numbers are given to blocks that the format does not name: hash ids and logged names are smaller."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    timestamp_s: float
    """On the recorder's clock."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """One per started block of the prompt; equal numbers, equal tokens."""
    tenant: str = ""
    priority: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt that were not computed for this answer, where the recorder says it."""


class Numbers:
    """Numbers of blocks that no other request has."""

    def __init__(self) -> None:
        self._next = OWN_NUMBERS

    def next(self, count: int) -> tuple[int, ...]:
        numbers = tuple(range(self._next, self._next + count))
        self._next += count
        return numbers


class Format(Protocol):
    @property
    def block_tokens(self) -> int: ...

    @property
    def first_is_header(self) -> bool:
        """Whether the first line is not a row."""

    @property
    def repeats_answers(self) -> bool:
        """Whether a row that begins with all blocks of an earlier one continues with the answer to that one."""

    def row(self, line: str, where: str) -> TraceRow | None:
        """Returns the row of a line. None: the line says something else."""


def format_of(first_line: str, where: str) -> Format:
    if not first_line.startswith(("{", "[")):
        return Azure(_columns(first_line, where))
    first = _json_object(first_line, where)
    if not is_record(first):
        return Mooncake()
    return RequestLogFormat()


class Mooncake:
    """kvcache-ai/Mooncake: {timestamp (ms), input_length, output_length, hash_ids[], tenant, priority}."""

    block_tokens = MOONCAKE_BLOCK_TOKENS
    first_is_header = False
    repeats_answers = False

    def row(self, line: str, where: str) -> TraceRow:
        row = _json_object(line, where)
        timestamp = _field(row, "timestamp", where)
        if not _is_number(timestamp) or not 0 <= timestamp <= MAX_TIMESTAMP_MS:
            raise _malformed(where, "timestamp", f"a number of milliseconds from 0 to {MAX_TIMESTAMP_MS}", timestamp)
        tenant, priority = row.get("tenant", ""), row.get("priority", 0)
        if not isinstance(tenant, str):
            raise _malformed(where, "tenant", "a string", tenant)
        if not _is_integer(priority):
            raise _malformed(where, "priority", "an integer", priority)
        return TraceRow(
            timestamp_s=timestamp / 1000,
            input_tokens=(input_tokens := _count(_field(row, "input_length", where), "input_length", where)),
            output_tokens=_count(_field(row, "output_length", where), "output_length", where),
            blocks=_hash_ids(row, input_tokens, where),
            tenant=tenant,
            priority=priority,
        )


@dataclass(slots=True)
class Azure:
    """The LLM inference traces of Azure/AzurePublicDataset: sharing is not told, so every block is its own."""

    columns: list[str]
    block_tokens: int = AZURE_BLOCK_TOKENS
    first_is_header: bool = True
    repeats_answers: bool = False
    _numbers: Numbers = field(default_factory=Numbers)

    def row(self, line: str, where: str) -> TraceRow:
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(self.columns):
            missing = self.columns[len(values)] if len(values) < len(self.columns) else None
            wrong = f"no {missing}" if missing else "too many values"
            raise ConfigError(
                f"{where}: {wrong}: {len(values)} values under {len(self.columns)} columns: {_shown(line)}",
                field=missing or "trace",
            )
        row = dict(zip(self.columns, values, strict=True))
        input_tokens = _count(_integer(row["ContextTokens"]), "ContextTokens", where)
        return TraceRow(
            timestamp_s=_instant(row["TIMESTAMP"], where),
            input_tokens=input_tokens,
            output_tokens=_count(_integer(row["GeneratedTokens"]), "GeneratedTokens", where),
            blocks=self._numbers.next(-(-input_tokens // self.block_tokens)),
        )


@dataclass(slots=True)
class RequestLogFormat:
    """Ours: answers are rows, in the order of their ends; what it says about workers is for others."""

    block_tokens: int = 0
    """Tokens of a block, as the log's first answer says."""
    first_is_header: bool = False
    repeats_answers: bool = True
    _numbers: Numbers = field(default_factory=Numbers)

    def row(self, line: str, where: str) -> TraceRow | None:
        record = record_of(line, where)
        if isinstance(record, WorkerRecord) or not record.output_tokens:
            return None
        self._check(record, where)
        tail = record.prompt_tokens > len(record.block_hashes) * record.block_size
        return TraceRow(
            timestamp_s=record.arrival_s,
            input_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            blocks=(*record.block_hashes, *self._numbers.next(int(tail))),
            tenant=record.tenant,
            priority=record.priority,
            cached_tokens=record.cached_tokens,
        )

    def _check(self, record: AnswerRecord, where: str) -> None:
        self.block_tokens = self.block_tokens or record.block_size
        if record.block_size != self.block_tokens:
            wanted = f"{self.block_tokens}, as in the answers before (a log of two fleets is two traces)"
            raise _malformed(where, "block_size", wanted, record.block_size)


def _json_object(line: str, where: str) -> dict[str, Any]:
    row = json_of(line, where)
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be an object, got {type(row).__name__}", field="trace")
    return row


def _columns(header: str, where: str) -> list[str]:
    columns = [column.strip() for column in header.split(",")]
    missing = [column for column in AZURE_COLUMNS if column not in columns]
    if missing:
        raise ConfigError(
            f"{where}: neither a JSON object (Mooncake's format, or a request log) nor a CSV header with "
            f"{', '.join(AZURE_COLUMNS)}: {missing[0]} is missing in {_shown(header)}",
            field=missing[0],
        )
    return columns


def _instant(text: str, where: str) -> float:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise _malformed(where, "TIMESTAMP", "a date and time like 2023-11-16 18:15:46.68", text) from None
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()


def _integer(text: str) -> object:
    """Returns the number that the text says, or the text itself if it says no number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TOKENS)) else text


def _count(value: object, field_name: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise _malformed(where, field_name, f"a positive integer up to {MAX_TOKENS}", value)
    return value


def _hash_ids(row: dict[str, Any], input_tokens: int, where: str) -> tuple[int, ...]:
    value = _field(row, "hash_ids", where)
    if not isinstance(value, list) or not all(_is_integer(each) and 0 <= each < OWN_NUMBERS for each in value):
        raise _malformed(where, "hash_ids", "a list of integers from 0 to 2^64 - 1", value)
    needed = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(value) != needed:
        wanted = f"{needed} long for an input_length of {input_tokens} ({MOONCAKE_BLOCK_TOKENS} tokens each)"
        raise _malformed(where, "hash_ids", wanted, f"{len(value)} entries")
    return tuple(value)


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise ConfigError(f"{where}: {name} is missing", field=name)
    return row[name]


def _malformed(where: str, name: str, requirement: str, value: object) -> ConfigError:
    return ConfigError(f"{where}: {name} must be {requirement}, got {_shown(value)}", field=name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def lines_of(path: Path, flag: str) -> Iterator[str]:
    """Raises ConfigError naming the flag where there is no such file, and the first line that is not text."""
    field = flag.removeprefix("--")
    try:
        # Whatever is no UTF-8 becomes a surrogate, which no text can be encoded with: so its line is known.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isascii():
                    _check_text(line, f"{path}:{number}", field)
                yield line
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", field=field) from error


def json_of(line: str, where: str) -> Any:
    """Raises ConfigError naming `where`, and the column if one is known."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error.msg} (column {error.colno})", field="trace") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}", field="trace") from error


def _check_text(line: str, where: str, field: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text", field=field) from error


_KINDS: dict[str, type[AnswerRecord] | type[WorkerRecord]] = {"answer": AnswerRecord, "worker": WorkerRecord}


def is_record(record: dict[str, Any]) -> bool:
    return "record" in record


def record_of(line: str, where: str) -> Record:
    """Raises ConfigError naming `where` and the field that is not as written above."""
    row = json_of(line, where)
    kind = row.get("record") if isinstance(row, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{where}: record must be one of {', '.join(_KINDS)}, got {kind!r}", field="record")
    try:
        record = from_values(_KINDS[kind], row)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", field=error.field) from error
    if isinstance(record, AnswerRecord):
        _check(record, where)
    return record


def _check(record: AnswerRecord, where: str) -> None:
    """Refuses numbers that no router writes."""
    if not 0 <= record.arrival_s < float("inf"):
        raise ConfigError(f"{where}: arrival_s must be seconds since 1970, got {record.arrival_s}", field="arrival_s")
    for name, value, least, most in (
        ("prompt_tokens", record.prompt_tokens, 1, MAX_TOKENS),
        ("output_tokens", record.output_tokens, 0, MAX_TOKENS),
        ("block_size", record.block_size, 1, MAX_TOKENS),
        ("cached_tokens", record.cached_tokens, 0, record.prompt_tokens),
    ):
        if not least <= value <= most:
            raise _malformed(where, name, f"a whole number from {least} to {most}", value)
    digits = 2 * LOGGED_HASH_BYTES * (record.prompt_tokens // record.block_size)
    if len(record.blocks) != digits or set(record.blocks) - set("0123456789abcdef"):
        raise ConfigError(
            f"{where}: blocks must be {digits} hex digits for {record.prompt_tokens} tokens in blocks of "
            f"{record.block_size}, got {len(record.blocks)} characters",
            field="blocks",
        )
