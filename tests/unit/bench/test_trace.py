"""Mooncake-format rows in, or an error that names line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.trace import TraceRow, parse_trace, read_trace
from twostroke.errors import ConfigError

GOOD: dict[str, Any] = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}


def lines(*rows: dict[str, Any] | str) -> list[str]:
    return [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]


def test_a_row_is_read_with_its_time_in_seconds() -> None:
    assert parse_trace(lines(GOOD), "t") == (TraceRow(1.5, 600, 7, (0, 4)),)


def test_blank_lines_are_skipped_and_the_limit_counts_rows() -> None:
    later = GOOD | {"timestamp": 3000}
    assert [row.timestamp_s for row in parse_trace(lines(GOOD, "\n", later, later), "t", limit=2)] == [1.5, 3.0]


def test_rows_after_the_limit_are_not_looked_at() -> None:
    assert len(parse_trace(lines(GOOD, "nonsense"), "t", limit=1)) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": "0"}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"output_length": -3}, "output_length"),
        ({"hash_ids": 3}, "hash_ids"),
        ({"hash_ids": [1, "2"]}, "hash_ids"),
        ({"hash_ids": [1, -2]}, "hash_ids"),
        ({"hash_ids": [1]}, "hash_ids"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids"),
    ],
)
def test_a_malformed_row_is_refused_with_line_and_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^trace\.jsonl:3: {field} must be") as caught:
        parse_trace(lines(GOOD, "\n", GOOD | change), "trace.jsonl")
    assert caught.value.field == field


@pytest.mark.parametrize("field", list(GOOD))
def test_a_missing_field_is_named(field: str) -> None:
    row = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(ConfigError, match=f"t:1: {field} is missing"):
        parse_trace(lines(row), "t")


@pytest.mark.parametrize(("line", "problem"), [('{"timestamp": 1,', "t:2: not valid JSON"), ("[1]", "t:2: a row must")])
def test_a_line_that_is_no_object_is_refused(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_trace(lines(GOOD, line), "t")


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        parse_trace(["\n"], "t")


def test_a_missing_file_and_a_binary_one_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(tmp_path / "binary")
