"""The switch of a profile, what it records, and how much of it."""

from __future__ import annotations

import ctypes
import time

import pytest

from twostroke.base.errors import Overloaded
from twostroke.observability.profiler import ENGINE, ITEM_BYTES, KernelRecord, KernelRecords, Profiler, Slice
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import Span

ONE = KernelRecord.pack(1, 2, 3.0, 4.0, 5, 6, 7, 8)


def kernels(count: int) -> KernelRecords:
    """Records as a native forward pass leaves them."""
    records = KernelRecords()
    run_kernels(records, count)
    return records


def run_kernels(records: KernelRecords, count: int) -> None:
    ctypes.memmove(ctypes.addressof(records), ONE * count, count * KernelRecord.size)
    records.count = count


def test_nothing_is_recorded_and_nothing_is_made_while_nobody_asks() -> None:
    profiler = Profiler()
    assert not profiler.is_on
    assert profiler.slice(ENGINE, "step") is profiler.slice(ENGINE, "forward", kernels=kernels(1))


def test_a_slice_has_its_times_its_facts_and_the_kernels_that_ran_within() -> None:
    profiler = Profiler()
    begin_ns = time.monotonic_ns()
    with profiler.recording() as profile, profiler.slice(ENGINE, "forward", {"rows": 3}, records := kernels(0)):
        run_kernels(records, 2)
    (piece,) = profile.items
    assert isinstance(piece, Slice)
    assert begin_ns <= piece.start_ns <= piece.end_ns <= time.monotonic_ns()
    assert (piece.track, piece.name, piece.facts) == (ENGINE, "forward", {"rows": 3})
    assert piece.kernels == ONE * 2
    assert not profiler.is_on


def test_a_step_that_fails_is_recorded_too() -> None:
    profiler = Profiler()
    with profiler.recording() as profile, pytest.raises(ZeroDivisionError), profiler.slice(ENGINE, "step"):
        _ = 1 / 0
    assert len(profile.items) == 1


def test_one_profile_at_a_time() -> None:
    profiler = Profiler()
    with profiler.recording():
        with pytest.raises(Overloaded), profiler.recording():
            pass
        assert profiler.is_on, "the refused one does not end the first"
    with profiler.recording():
        pass


def test_the_oldest_makes_room_and_is_counted_with_its_kernels() -> None:
    profiler = Profiler()
    size_bytes = ITEM_BYTES + 2 * KernelRecord.size
    with profiler.recording(most_bytes=3 * size_bytes) as profile:
        for number in range(10):
            with profiler.slice(ENGINE, str(number), kernels=kernels(2)):
                pass
    assert [piece.name for piece in profile.items] == ["7", "8", "9"]
    assert profile.dropped == 7 * 3


def test_spans_that_end_meanwhile_are_seen_whether_or_not_anybody_follows_their_trace() -> None:
    recorder, seen = Recorder("worker"), list[Span]()
    recorder.root("request", "before", "").end()
    with recorder.watched(seen.append):
        recorder.root("request", "meanwhile", "").end()
        recorder.begin("queue", "meanwhile", None).end()
    recorder.root("request", "after", "").end()
    assert [span.name for span in seen] == ["request", "queue"]
