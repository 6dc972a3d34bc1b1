"""A profile as Chrome's trace format asks, and as a table whose parts add up."""

from __future__ import annotations

import io
import json
from itertools import pairwise

import pytest

from cluster.commands.looking.profile import write
from cluster.profiles.chrome_trace import events_of
from cluster.profiles.collecting import ProcessProfile
from cluster.profiles.table import lines_of, sums_of
from tests.unit.cluster.profiles.profiles import MS, check_events, kernel, named, piece, span, worker
from twostroke.observability.profiler import ENGINE


def test_the_file_is_json_of_events_as_the_format_asks() -> None:
    profile = worker()
    profile.spans += [span("attempt", 101, 109), span("queue", 102, 103), span("pull", 102.5, 104, opened=102.7)]
    file = io.StringIO()
    write([profile, ProcessProfile("decode-1", failure="it died")], file)
    trace = json.loads(file.getvalue())
    check_events(trace["traceEvents"])
    assert trace["otherData"]["decode-1"]["failure"] == "it died"
    assert trace["otherData"]["decode-0"]["limit_read_gb_per_s"] == 10


def test_a_step_holds_its_parts_and_the_forward_pass_its_kernels() -> None:
    events = list(events_of([worker()]))
    (step,), (forward,), (qkv,) = (named(events, name) for name in ("step", "forward", "qkv"))
    assert (step["ts"], step["dur"]) == (1000, 10_000)
    assert (qkv["ts"], qkv["dur"]) == (3000, 2000)
    assert step["tid"] == forward["tid"] == qkv["tid"]
    assert qkv["args"] == {
        "layer": 3,
        "rows": 16,
        "threads": 1,
        "bytes": 10e6,
        "flops": 1e6,
        "share_of_limit": 0.5,  # 10 MB at 10 GB/s are 1 ms of 2
    }
    assert named(events, "attention")[0]["args"]["share_of_limit"] == 0.25, "two threads may do twice as much in 4 ms"


def test_a_product_that_was_faster_than_the_measured_limit_raises_it() -> None:
    profile = worker()
    profile.raise_limits()
    assert profile.about.limits.operations_per_s == 100e9, "its products were slower"
    profile.slices.append(piece(ENGINE, "forward", 120, 130, kernel("down", 121, 122, 1e6, 500e6, threads=2)))
    profile.raise_limits()
    assert profile.about.limits.operations_per_s == 250e9
    assert named(events_of([profile]), "down")[0]["args"]["share_of_limit"] == 1


def test_processes_of_several_machines_stand_on_one_time_line() -> None:
    far = worker("decode-1", clock_offset_ns=-900_000 * MS, begin_ms=900_120)
    steps = named(events_of([far, worker()]), "step")
    assert [step["ts"] for step in sorted(steps, key=lambda step: step["pid"])] == [1000, 21_000]


def test_requests_at_the_same_time_get_lanes_of_their_own_and_a_lane_is_used_again() -> None:
    profile = worker()
    profile.spans += [
        span("attempt", 101, 110, trace=1),
        span("decode", 102, 110, trace=1),
        span("chunk", 101.5, 103, trace=1),  # crosses the decode span of its own request
        span("attempt", 105, 120, trace=2),
        span("attempt", 111, 112, trace=3),
    ]
    events = list(events_of([profile]))
    check_events(events)
    first, second, third = sorted(named(events, "attempt"), key=lambda event: event["ts"])
    assert first["tid"] == third["tid"] != second["tid"]
    assert named(events, "decode")[0]["tid"] != named(events, "chunk")[0]["tid"]


def test_a_span_that_began_before_the_recording_begins_with_it_and_says_how_long_it_was() -> None:
    profile = worker()
    profile.spans.append(span("attempt", 40, 110))
    (shown,) = named(events_of([profile]), "attempt")
    assert (shown["ts"], shown["dur"]) == pytest.approx((0, 10_000), abs=1)
    assert shown["args"]["seconds"] == pytest.approx(0.07)


def test_the_parts_of_the_table_add_up_to_the_steps() -> None:
    sums = sums_of(worker())
    assert {name: round(total.seconds * 1e3, 6) for name, total in sums.items()} == {
        "prepare": 1,
        "forward": 2,
        "qkv": 2,
        "attention": 4,
        "sample": 0.5,
        "rest of step": 0.5,
    }
    lines = list(lines_of([worker(), ProcessProfile("decode-1", failure="it died")]))
    assert "decode-0: 1 steps, 0.010 of 0.1 s, 10.00 ms and 16.0 rows each" in lines
    assert any(line.split() == ["attention", "40.0%", "4.000", "0.2", "50", "25%"] for line in lines)
    assert "decode-1: it died" in lines
    shares = [float(line.split()[-5].rstrip("%")) for line in lines if line.endswith("%")]
    assert all(a >= b for a, b in pairwise(shares)), "the largest comes first"
