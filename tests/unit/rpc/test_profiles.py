"""The profile of one process as messages: whole steps, in parts that leave room for other calls."""

from __future__ import annotations

import time

import pytest

from twostroke.base.errors import InvalidRequest, Overloaded
from twostroke.observability.profiler import ENGINE, Profiler
from twostroke.rpc import profiles
from twostroke.rpc.profiles import ProfiledParts, profile_here
from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.recorder import Recorder


class Process:
    """Between two steps it is asked to pause, twice: each time a slice ends before, and one begins after."""

    def __init__(self) -> None:
        self.profiler, self.pauses = Profiler(), 0
        self.parts = ProfiledParts("decode", Recorder("decode-0"), self.profiler, self.pause, self.limits)

    async def pause(self) -> int:
        self.pauses += 1
        with self.profiler.slice(ENGINE, f"before pause {self.pauses}", {"rows": 3}):
            pass
        moment_ns = time.monotonic_ns()
        with self.profiler.slice(ENGINE, f"after pause {self.pauses}"):
            pass
        return moment_ns

    async def limits(self) -> control_pb2.MachineLimits:
        assert not self.profiler.is_on, "the machine is measured after the recording"
        return control_pb2.MachineLimits(threads=2)

    async def profile(self, seconds: float = 0.001) -> list[control_pb2.ProfilePart]:
        return [part async for part in profile_here(self.parts, seconds)]


async def test_what_ran_across_the_beginning_or_begins_after_the_end_is_left_out() -> None:
    process = Process()
    first, rest = await process.profile()
    assert (first.process, first.about.role, first.about.limits.threads) == ("decode-0", "decode", 2)
    assert [piece.name for piece in rest.slices] == ["after pause 1", "before pause 2"]
    assert rest.slices[1].facts == {"rows": 3}
    assert first.about.begin_ns <= rest.slices[0].start_ns <= rest.slices[1].end_ns <= first.about.end_ns
    assert not process.profiler.is_on


async def test_a_long_profile_comes_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "PART_BYTES", 1)
    parts = await Process().profile()
    assert [len(part.slices) for part in parts] == [0, 1, 1, 0]
    assert {part.process for part in parts} == {"decode-0"}


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0, float("nan"), float("inf")])
async def test_a_time_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="seconds must be above 0"):
        await Process().profile(seconds)


async def test_a_caller_that_leaves_ends_its_profile() -> None:
    process = Process()
    parts = profile_here(process.parts, 0.001)
    await anext(parts)
    await parts.aclose()
    assert not process.profiler.is_on
    with process.profiler.recording(), pytest.raises(Overloaded):
        await process.profile()
