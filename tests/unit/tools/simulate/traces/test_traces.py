"""Rows of every format in, or an error that names line and field; at whatever pace, they share what they shared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.simulate.traces.trace import Replay, Trace, TraceRow, parse_trace, read_trace, replayed
from twostroke.base.errors import ConfigError
from twostroke.observability.request_log import AnswerRecord, WorkerRecord, blocks_of, line_of

GOOD: dict[str, Any] = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n",
    "2023-11-16 18:15:46.6805900,374,44\r\n",
    "2023-11-16 18:15:50.9951690,1030,109",
]
ANSWER = AnswerRecord(
    request_id="a#0",
    arrival_s=1000.5,
    outcome="stop",
    prompt_tokens=35,
    output_tokens=4,
    block_size=16,
    blocks=blocks_of([bytes([1] * 16), bytes([2] * 16)]),
    tenant="alice",
    priority=2,
    policy="kv",
    attempts=1,
)
WORKER = WorkerRecord(
    at_s=1.0,
    worker="decode-0",
    role="decode",
    epoch="1.00",
    status="serving",
    block_size=16,
    page_bytes=64,
    pages_total=8,
    step_tokens=128,
    step_target_s=0.04,
)


def lines(*rows: dict[str, Any] | str) -> list[str]:
    return [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]


def test_a_mooncake_row_is_read_with_its_time_in_seconds() -> None:
    trace = parse_trace(lines(GOOD), "t")
    assert trace == Trace("t", 512, (TraceRow(1.5, 600, 7, (0, 4)),))


def test_a_mooncake_row_may_name_tenant_and_priority() -> None:
    row = parse_trace(lines(GOOD | {"tenant": "bob", "priority": -1}), "t").rows[0]
    assert (row.tenant, row.priority) == ("bob", -1)


def test_blank_lines_are_skipped_and_the_limit_counts_rows() -> None:
    later = GOOD | {"timestamp": 3000}
    assert [row.timestamp_s for row in parse_trace(lines(GOOD, "\n", later, later), "t", limit=2).rows] == [1.5, 3.0]


def test_rows_after_the_limit_are_not_looked_at() -> None:
    assert len(parse_trace(lines(GOOD, "nonsense"), "t", limit=1).rows) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": "0"}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"timestamp": float("inf")}, "timestamp"),
        ({"timestamp": 10**400}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"input_length": 10**12}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"output_length": -3}, "output_length"),
        ({"output_length": False}, "output_length"),
        ({"hash_ids": 3}, "hash_ids"),
        ({"hash_ids": [1, "2"]}, "hash_ids"),
        ({"hash_ids": [1, -2]}, "hash_ids"),
        ({"hash_ids": [1, 2.0]}, "hash_ids"),
        ({"hash_ids": [1, 1 << 64]}, "hash_ids"),
        ({"hash_ids": [1]}, "hash_ids"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids"),
        ({"tenant": 5}, "tenant"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_a_malformed_mooncake_row_is_refused_with_line_and_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^trace\.jsonl:3: {field} must be") as caught:
        parse_trace(lines(GOOD, "\n", GOOD | change), "trace.jsonl")
    assert caught.value.field == field


@pytest.mark.parametrize("field", list(GOOD))
def test_a_missing_field_is_named(field: str) -> None:
    row = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(ConfigError, match=f"t:2: {field} is missing"):
        parse_trace(lines(GOOD, row), "t")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 1,', "t:2: not valid JSON"),
        ("[1]", "t:2: a row must"),
        ("[" * 100_000, "t:2: not valid JSON"),
    ],
)
def test_a_line_that_is_no_object_is_refused(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_trace(lines(GOOD, line), "t")


def test_an_azure_file_is_known_by_its_header_and_shares_no_block() -> None:
    trace = parse_trace(AZURE, "t")
    first, second = trace.rows
    assert (first.input_tokens, first.output_tokens, len(first.blocks)) == (374, 44, 1)
    assert (second.input_tokens, second.output_tokens, len(second.blocks)) == (1030, 109, 3)
    assert second.timestamp_s - first.timestamp_s == pytest.approx(4.314579, abs=1e-5)
    assert len({*first.blocks, *second.blocks}) == 4


def test_azure_columns_may_stand_in_any_order_with_others_between() -> None:
    rows = ["GeneratedTokens, Model ,ContextTokens,TIMESTAMP", "9,x,700,2024-05-10 00:00:01.5+00:00"]
    row = parse_trace(rows, "t").rows[0]
    assert (row.timestamp_s, row.input_tokens, row.output_tokens) == (1715299201.5, 700, 9)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("yesterday,374,44", "TIMESTAMP"),
        (",374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:46,0,44", "ContextTokens"),
        ("2023-11-16 18:15:46,-3,44", "ContextTokens"),
        ("2023-11-16 18:15:46,1e3,44", "ContextTokens"),
        ("2023-11-16 18:15:46," + "9" * 5000 + ",44", "ContextTokens"),
        ("2023-11-16 18:15:46,374,", "GeneratedTokens"),
        ("2023-11-16 18:15:46,374,4.5", "GeneratedTokens"),
    ],
)
def test_a_malformed_azure_row_is_refused_with_line_and_field(line: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a\.csv:4: {field} must be") as caught:
        parse_trace([*AZURE, line], "a.csv")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("line", "problem"),
    [("2023-11-16 18:15:46,374", "no GeneratedTokens: 2"), ("2023-11-16 18:15:46,374,44,1", "too many values: 4")],
)
def test_an_azure_row_of_another_width_is_refused(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a\.csv:4: {problem} values under 3 columns"):
        parse_trace([*AZURE, line], "a.csv")


@pytest.mark.parametrize("header", ["TIMESTAMP,ContextTokens", "hello", "1,2,3", "TIMESTAMP;ContextTokens"])
def test_a_first_line_of_no_known_format_is_refused_with_what_is_missing(header: str) -> None:
    with pytest.raises(ConfigError, match=r"^t:2: neither .* is missing"):
        parse_trace(["\n", header, "x"], "t")


def test_a_request_log_is_a_trace_of_its_answers() -> None:
    whole = replace(ANSWER, prompt_tokens=32)
    rows = parse_trace([line_of(WORKER), line_of(ANSWER), line_of(whole)], "log").rows
    assert [(row.timestamp_s, row.input_tokens, row.output_tokens) for row in rows] == [
        (1000.5, 35, 4),
        (1000.5, 32, 4),
    ]
    assert rows[0].blocks[:2] == rows[1].blocks == (0x0101010101010101, 0x0202020202020202)
    assert len(rows[0].blocks) == 3, "the tail has a number of its own"
    assert (rows[0].tenant, rows[0].priority) == ("alice", 2)


def test_answers_that_sent_nothing_are_no_rows() -> None:
    refused = replace(ANSWER, output_tokens=0, outcome="Overloaded")
    assert len(parse_trace([line_of(refused), line_of(ANSWER)], "log").rows) == 1
    with pytest.raises(ConfigError, match="no rows"):
        parse_trace([line_of(refused), line_of(WORKER)], "log")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"record": ["answer"]}, "record"),
        ({"arrival_s": "now"}, "arrival_s"),
        ({"arrival_s": -1.0}, "arrival_s"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"output_tokens": -1}, "output_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 32}, "block"),
        ({"blocks": "01"}, "blocks"),
        ({"blocks": "zz" * 16}, "blocks"),
        ({"forecast": {"queue_s": "long"}}, "queue_s"),
        ({"mood": "good"}, "mood"),
        ({"record": "story"}, "record"),
    ],
)
def test_a_malformed_line_of_a_log_is_refused_with_line_and_field(change: dict[str, Any], field: str) -> None:
    bad = json.dumps(json.loads(line_of(ANSWER)) | change)
    with pytest.raises(ConfigError, match=rf"^log:2: .*{field}"):
        parse_trace([line_of(ANSWER), bad], "log")


def test_a_log_of_two_block_sizes_is_refused() -> None:
    other = replace(ANSWER, block_size=8, blocks=blocks_of(bytes([n] * 16) for n in range(4)))
    with pytest.raises(ConfigError, match="log:2: block_size must be 16"):
        parse_trace([line_of(ANSWER), line_of(other)], "log")


@pytest.mark.parametrize("empty", [["\n"], [], [AZURE[0]]])
def test_a_trace_without_rows_is_refused(empty: list[str]) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        parse_trace(empty, "t")


def test_a_missing_file_a_folder_and_a_binary_file_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary:2: not UTF-8"):
        read_trace(tmp_path / "binary")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("".join(AZURE), encoding="utf-8-sig")
    assert len(read_trace(tmp_path / "a.csv").rows) == 2


def burst(*times_ms: int) -> Trace:
    return parse_trace(lines(*(GOOD | {"timestamp": at} for at in times_ms)), "t")


def test_a_replay_begins_at_zero_in_order_and_keeps_bursts_raw() -> None:
    played = replayed(burst(9000, 3000, 3000, 6000), Replay())
    assert [row.timestamp_s for row in played.rows] == [0.0, 0.0, 3.0, 6.0]


def test_jitter_follows_from_the_seed_and_stays_in_its_bounds() -> None:
    bursts = burst(*[0] * 50, *[3000] * 50)
    one, again, other = (replayed(bursts, Replay(jitter_s=3.0, seed=seed)) for seed in (1, 1, 2))
    times_s = [row.timestamp_s for row in one.rows]
    assert one == again
    assert one != other
    assert times_s == sorted(times_s)
    assert len(set(times_s)) == 100
    assert all(0 <= at_s <= 6 for at_s in times_s)
    assert 40 <= sum(at_s < 3 for at_s in times_s) <= 60


def test_time_scale_stretches_jitter_too() -> None:
    slow, fast = (replayed(burst(0, 1500, 9000), Replay(jitter_s=3.0, time_scale=scale)) for scale in (1.0, 0.25))
    assert [row.timestamp_s for row in fast.rows] == pytest.approx([row.timestamp_s / 4 for row in slow.rows])


def test_length_scale_shrinks_prompts_answers_and_blocks_alike() -> None:
    small = replayed(burst(0), Replay(length_scale=0.125))
    assert small.block_tokens == 64
    assert small.rows == (TraceRow(0.0, 64 + 11, 1, (0, 4)),)
    smallest = replayed(burst(0), Replay(length_scale=1e-9))
    assert (smallest.block_tokens, smallest.rows[0].input_tokens) == (1, 2), "every block keeps a token"


@pytest.mark.parametrize(
    "wrong", [{"jitter_s": -1.0}, {"jitter_s": float("nan")}, {"time_scale": 0.0}, {"length_scale": float("inf")}]
)
def test_a_replay_that_cannot_be_meant_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="trace's"):
        Replay(**wrong)
