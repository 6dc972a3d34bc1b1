"""Faults that happen to processes of their own: killed, frozen, counted, written down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.trials.chaos.injection.injector import ONE, Injector, from_environment
from tests.trials.chaos.injection.plan import Fault, Kind
from tests.trials.chaos.injection.points import OF_RANKS
from twostroke.base import fault_points
from twostroke.base.errors import ConfigError
from twostroke.base.fault_points import Point

Start = Callable[[str, str], subprocess.Popen[str]]

SETUP = """
import threading, time
from tests.trials.chaos.injection.injector import from_environment
from twostroke.base.fault_points import Point
injector = from_environment()
injector.begin("child")
reach = injector.reach
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A child that runs `code`, with TWOSTROKE_FAULT as given."""

    def started(fault: str, code: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "TWOSTROKE_FAULT": fault,
            "TWOSTROKE_FAULT_JOURNAL": str(tmp_path / "journal"),
        }
        command = [sys.executable, "-c", SETUP + code]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    return started


def journal(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Rank:
    process: subprocess.Popen[bytes]
    connection: Connection


@pytest.fixture
def rank() -> Iterator[tuple[Rank, Connection]]:
    """A process in another rank's place, and its end of the connection."""
    ours, theirs = Pipe()
    with subprocess.Popen(["sleep", "60"]) as process, ours, theirs:
        yield Rank(process, ours), theirs
        process.kill()


@pytest.mark.parametrize("kind", sorted(OF_RANKS))
def test_a_fault_of_a_rank_hits_the_last_one_and_cuts_its_connection_alone(
    kind: Kind, rank: tuple[Rank, Connection]
) -> None:
    last, theirs = rank
    breaking = Injector("here")
    breaking.ranks.append(last)
    breaking.arm(Fault(Point.WORKER_STEP, kind))
    breaking.reach(Point.WORKER_STEP)
    state = os.WEXITED | os.WSTOPPED | os.WNOWAIT
    if kind is Kind.CUT_RANK:
        assert last.process.poll() is None
        with pytest.raises(EOFError):
            theirs.recv_bytes()
        with pytest.raises(BrokenPipeError):
            last.connection.send_bytes(b"a step")
    else:
        ended = os.waitid(os.P_PID, last.process.pid, state)
        assert ended is not None
        assert ended.si_status == (signal.SIGKILL if kind is Kind.KILL_RANK else signal.SIGSTOP)


def test_a_point_is_counted_from_when_the_fault_was_armed_and_hit_once() -> None:
    counting = Injector("here")
    assert not counting.reach(Point.ROUTER_EVENTS)
    counting.arm(Fault.parse("router.events:lose:3"))
    met = [counting.reach(point) for point in [Point.WORKER_EVENTS, *[Point.ROUTER_EVENTS] * 5]]
    assert met == [False, False, False, True, False, False]
    assert counting.reached == {"router.events": 6, "worker.events": 1}


def test_what_was_armed_is_replaced_and_healed() -> None:
    counting = Injector("here")
    counting.arm(Fault.parse("router.events:lose:1"))
    counting.arm(Fault.parse("worker.events:lose:1"))
    assert not counting.reach(Point.ROUTER_EVENTS)
    counting.heal()
    assert not counting.reach(Point.WORKER_EVENTS)


def test_of_many_threads_at_a_point_one_meets_the_fault() -> None:
    counting = Injector("here")
    counting.arm(Fault.parse("router.events:lose:4000"))
    gate = threading.Barrier(8)

    def reach_often() -> int:
        gate.wait()
        return sum(counting.reach(Point.ROUTER_EVENTS) for _ in range(1000))

    with ThreadPoolExecutor(8) as threads:
        assert sum(run.result() for run in [threads.submit(reach_often) for _ in range(8)]) == 1
    assert counting.reached == {"router.events": 8000}


def test_without_the_variable_there_is_no_injector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWOSTROKE_FAULT", raising=False)
    assert from_environment() is None
    assert not fault_points.reach(Point.ROUTER_EVENTS)
    monkeypatch.setenv("TWOSTROKE_FAULT", "nowhere:kill:1")
    with pytest.raises(ConfigError, match="there is no point 'nowhere'"):
        from_environment()


def test_a_killed_process_has_written_down_why_and_does_nothing_more(start: Start, tmp_path: Path) -> None:
    child = start(
        "worker.step:kill:3",
        """
def run():
    for turn in range(10):
        print(turn, flush=True)
        reach(Point.WORKER_STEP)
threading.Thread(target=run).start()
""",
    )
    said, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert said.split() == ["0", "1", "2"]
    (line,) = journal(tmp_path)
    assert (line["process"], line["pid"], line["fault"]) == ("child", child.pid, "worker.step:kill:3:10")


def test_a_frozen_process_stands_still_with_all_its_threads_and_wakes_up(start: Start, tmp_path: Path) -> None:
    """The thread that came to the point does not take one more step before."""
    child = start(
        "worker.step:stop:1:0.4",
        """
longest, is_over, started, passed = 0.0, threading.Event(), threading.Event(), []
def tick():
    global longest
    last = time.monotonic()
    is_last = False
    while not is_last:
        is_last = is_over.is_set()
        now = time.monotonic()
        longest = max(longest, now - last)
        last = now
        started.set()
        time.sleep(0.001)
def run():
    before = time.monotonic()
    reach(Point.WORKER_STEP)
    passed.append(time.monotonic() - before)
ticking = threading.Thread(target=tick)
ticking.start()
started.wait()
running = threading.Thread(target=run)
running.start()
running.join()
is_over.set()
ticking.join()
print(longest, passed[0])
""",
    )
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    gap_s, passed_s = map(float, said.split())
    assert gap_s > 0.3
    assert passed_s > 0.39
    assert len(journal(tmp_path)) == 1


def test_a_fault_that_is_meant_for_one_happens_in_one_of_all_that_are_armed(tmp_path: Path) -> None:
    fault = Fault.parse("router.events:lose:1")
    processes = [Injector(f"router-{at}", str(tmp_path / "journal")) for at in range(3)]

    def met() -> list[bool]:
        for process in processes:
            process.arm(fault)
        return [process.reach(Point.ROUTER_EVENTS) for process in processes]

    assert met() == [True, True, True]
    for _ in range(2):
        Path(ONE.format(journal=tmp_path / "journal", fault=fault)).touch()
        assert met() == [True, False, False]
    assert len(journal(tmp_path)) == 5
