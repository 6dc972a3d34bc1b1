"""Profiles made by hand, and what Chrome's trace format asks of every event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.profiles.collecting import ProcessProfile
from twostroke.observability.profiler import ENGINE, KERNELS, WORK_LOOP, KernelRecord
from twostroke.rpc.v1 import control_pb2

MS = 1_000_000
LIMITS = control_pb2.MachineLimits(threads=1, read_bytes_per_s=10e9, operations_per_s=100e9)


def piece(track: str, name: str, start_ms: float, end_ms: float, kernels: bytes = b"", **facts: float) -> Any:
    return control_pb2.ProfileSlice(
        track=track, name=name, start_ns=int(start_ms * MS), end_ns=int(end_ms * MS), facts=facts, kernels=kernels
    )


def kernel(name: str, start_ms: float, end_ms: float, size_bytes: float, operations: float, threads: int = 1) -> bytes:
    return KernelRecord.pack(
        int(start_ms * MS), int(end_ms * MS), size_bytes, operations, KERNELS.index(name), 3, 16, threads
    )


def worker(name: str = "decode-0", *, clock_offset_ns: int = 0, begin_ms: int = 100) -> ProcessProfile:
    """One step of 10 ms: 1 ms prepares, 8 ms are the forward pass with two kernels, 0.5 ms sample."""
    at = begin_ms
    kernels = kernel("qkv", at + 3, at + 5, 10e6, 1e6) + kernel("attention", at + 5, at + 9, 1e6, 200e6, threads=2)
    return ProcessProfile(
        name,
        control_pb2.ProfiledProcess(
            role="decode",
            machine="host",
            pid=7,
            clock_offset_ns=clock_offset_ns,
            clock_error_ns=abs(clock_offset_ns) // 1000,
            begin_ns=begin_ms * MS,
            end_ns=(begin_ms + 50) * MS,
            wall_offset_ns=10**18,
            limits=LIMITS,
        ),
        [
            piece(ENGINE, "prepare", at + 1, at + 2),
            piece(ENGINE, "forward", at + 2, at + 10, kernels),
            piece(ENGINE, "sample", at + 10, at + 10.5),
            piece(ENGINE, "step", at + 1, at + 11, rows=16),
            piece(WORK_LOOP, "build batch", at + 0.25, at + 0.5),
            piece(WORK_LOOP, "plan", at, at + 1),
        ],
    )


def span(name: str, start_ms: float, end_ms: float, trace: int = 1, **events_ms: float) -> control_pb2.TraceSpan:
    """A span by the wall clock of `worker`."""
    return control_pb2.TraceSpan(
        name=name,
        trace_id=f"{trace:032x}",
        start_s=1e9 + start_ms / 1e3,
        end_s=1e9 + end_ms / 1e3,
        events=[
            control_pb2.TraceEvent(name=event.replace("_", " "), at_s=1e9 + at_ms / 1e3)
            for event, at_ms in events_ms.items()
        ],
    )


def named(events: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name and event["ph"] != "M"]


def check_events(events: Sequence[dict[str, Any]]) -> None:
    """Fail unless these are events as the Trace Event Format asks: named, numbered and timed, and slices nest."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named_processes = {event["pid"] for event in events if event["name"] == "process_name"}
    named_threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in {"X", "i", "M"}
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        assert event["pid"] in named_processes
        if event["ph"] == "M":
            continue
        assert (event["pid"], event["tid"]) in named_threads
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert isinstance(event["cat"], str)
        if event["ph"] == "i":
            assert event["s"] in {"t", "p", "g"}
        else:
            assert event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        check_nested(slices)


def check_nested(slices: list[tuple[float, float]]) -> None:
    """Fail if two slices of a thread overlap and neither lies within the other: no viewer can draw that."""
    ends: list[float] = []
    for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
        while ends and ends[-1] <= start + 1e-3:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-3, f"{start}..{end} crosses the end of another at {ends[-1]}"
        ends.append(end)
