from __future__ import annotations

import argparse

import pytest

from tests.trials.chaos.faults.outcome import Outcome
from tests.trials.chaos.faults.report import Facts
from tests.trials.chaos.faults.trials import Trial
from tests.trials.chaos.injection.plan import Kind
from tests.trials.chaos.program import seconds
from tests.trials.chaos.soak.memory import Memory
from tests.trials.chaos.soak.options import SoakOptions, add_arguments, options_from
from tests.trials.chaos.soak.report import Course, summary, written
from twostroke.base.fault_points import Point

MIB = 1 << 20


def options(*flags: str) -> SoakOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_from(parser.parse_args(flags))


def watched(mib_per_minute: float, minutes: int = 30, files: int = 40, start_mib: float = 90) -> Memory:
    memory = Memory()
    for at in range(0, minutes * 60, 10):
        # Caches fill in the first minutes, and there is noise.
        size = start_mib + min(at, 100) / 2 + at % 3 + mib_per_minute * at / 60
        memory.take(float(at), [(7, "ray::DecodeActor.run", int(size * MIB), files), (8, "raylet", int(size * MIB), 1)])
    return memory


def test_a_process_that_fills_up_at_first_is_flat_and_one_that_goes_on_growing_is_not() -> None:
    assert watched(0.0).misses() == []
    assert "grows by 120 MiB an hour" in watched(2.0).misses()[0]
    assert watched(2.0, minutes=3).misses() == []  # too young to tell


def test_files_that_are_never_closed_are_named() -> None:
    assert "900 files open" in watched(0.0, files=900).misses()[0]


def test_processes_that_are_not_ours_are_not_watched() -> None:
    assert [process.kind for process in watched(0.0).processes.values()] == ["decode worker"]


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("1.5h", 5400), ("10m", 600), ("7", 7)])
def test_times_are_written_as_people_write_them(text: str, expected: float) -> None:
    assert seconds(text) == expected
    with pytest.raises(argparse.ArgumentTypeError):
        seconds("soon")


def test_the_report_counts_what_happened_and_names_misses() -> None:
    facts = Facts.now(options("--for", "1h", "--seed", "4").cluster, 3600.0)
    trial = Trial("decode", Point.DECODE_SAMPLED, Kind.KILL)
    fine = Outcome(
        trial=trial,
        transports="tcp",
        model="paced:",
        broken="decode-0",
        fault="f",
        has_happened=True,
        streams=9,
        wrong=(),
        left=None,
        missing=None,
        recovery_s=0.75,
        slowest="greedy",
        resumed=0,
    )
    course = Course(outcomes=[fine], quiet_streams=90, memories=[watched(0.0)])
    assert course.misses() == []
    page = written(course, facts)
    assert "60 minutes: 1 faults, 99 streams, 0 misses" in page
    assert "| kill | 1 | decode 1 | 9 | 0.75 | 0.75 | 0.75 |" in page
    assert "| decode worker | 1 |" in page
    course.wrong.append("greedy: tokens differ")
    assert "MISS greedy: tokens differ" in summary(course, facts)
