"""Lines of a router's request log read back as its records (`twostroke.request_log`)."""

from __future__ import annotations

from typing import Any

from tools.simulate.traces.lines import json_of
from twostroke.errors import ConfigError
from twostroke.json_values import from_values
from twostroke.request_log import LOGGED_HASH_BYTES, AnswerRecord, Record, WorkerRecord

_KINDS: dict[str, type[AnswerRecord] | type[WorkerRecord]] = {"answer": AnswerRecord, "worker": WorkerRecord}


def is_record(said: dict[str, Any]) -> bool:
    return "record" in said


def record_of(line: str, where: str) -> Record:
    """Raises ConfigError naming `where` and the field that is not as written above."""
    said = json_of(line, where)
    kind = said.get("record") if isinstance(said, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{where}: record must be one of {', '.join(_KINDS)}, got {kind!r}", field="record")
    try:
        record = from_values(_KINDS[kind], said)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", field=error.field) from error
    if isinstance(record, AnswerRecord):
        _check(record, where)
    return record


def _check(record: AnswerRecord, where: str) -> None:
    """Refuse numbers that no router writes."""
    if not 0 <= record.arrival_s < float("inf"):
        raise ConfigError(f"{where}: arrival_s must be seconds since 1970, got {record.arrival_s}", field="arrival_s")
    for name, value, least in (
        ("prompt_tokens", record.prompt_tokens, 1),
        ("output_tokens", record.output_tokens, 0),
        ("block_size", record.block_size, 1),
    ):
        if value < least:
            raise ConfigError(f"{where}: {name} must be {least} or more, got {value}", field=name)
    digits = 2 * LOGGED_HASH_BYTES * (record.prompt_tokens // record.block_size)
    if len(record.blocks) != digits or set(record.blocks) - set("0123456789abcdef"):
        raise ConfigError(
            f"{where}: blocks must be {digits} hex digits for {record.prompt_tokens} tokens in blocks of "
            f"{record.block_size}, got {len(record.blocks)} characters",
            field="blocks",
        )
