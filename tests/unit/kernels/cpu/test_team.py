"""The thread team: every part runs once, idle threads cost nothing, and a borrowed core goes back when it is wanted."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest

from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels, load_kernels
from twostroke.kernels.cpu.team import Team


@contextmanager
def team_of(*arguments: object, **options: object) -> Iterator[Team]:
    team = Team(*arguments, **options)  # type: ignore[arg-type]  # passed on
    try:
        yield team
    finally:
        team.close()


def probe(kernels: Kernels, team: Team, units: int = 64, spins: int = 0) -> list[int]:
    """Returns who ran each unit of one region: its part, from 1."""
    run = kernels.function(
        "twostroke_team_probe", (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_int64
    )
    who = (ctypes.c_int32 * units)()
    parts = run(team.address, who, units, spins)
    assert list(who) == [unit % parts + 1 for unit in range(units)], "each unit once, by the part it belongs to"
    return list(who)


def parts_of(kernels: Kernels, team: Team) -> int:
    return max(probe(kernels, team))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_parts_of_a_region_cover_all_work_exactly_once(kernels: Kernels, threads: int) -> None:
    with team_of(kernels, tuple(range(threads))) as team:
        for _ in range(30):
            with team.step():
                assert team.threads_now == threads
                for _ in range(20):
                    assert parts_of(kernels, team) == threads


def test_outside_a_step_the_caller_works_alone(kernels: Kernels) -> None:
    with team_of(kernels, (0, 1)) as team:
        assert team.threads_now == 0
        assert parts_of(kernels, team) == 1


def test_no_thread_spins_while_no_step_is_open(kernels: Kernels) -> None:
    with team_of(kernels, (0, 1, 2)) as team:
        with team.step():
            parts_of(kernels, team)
        time.sleep(0.05)
        before_s = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - before_s < 0.1


def test_a_helper_that_parked_within_a_long_step_is_woken_for_work(kernels: Kernels) -> None:
    with team_of(kernels, (0, 1)) as team, team.step():
        for _ in range(3):
            time.sleep(0.05)
            assert parts_of(kernels, team) == 2


def test_an_idle_core_is_borrowed_and_given_back_within_one_region(kernels: Kernels, tmp_path: Path) -> None:
    with (
        team_of(kernels, (0,), (1,), tmp_path, borrow_after_us=1_000_000) as borrower,
        team_of(kernels, (1,), (0,), tmp_path, patience_us=10_000_000) as owner,
    ):
        with borrower.step():
            assert parts_of(kernels, borrower) == 2
            held: list[int] = []
            waiting = Thread(target=lambda: hold_once(owner, held))
            waiting.start()
            while parts_of(kernels, borrower) == 2:
                assert waiting.is_alive() or not held, "the owner cannot run before the core is given back"
            assert borrower.threads_now == 1
            waiting.join()
            assert held == [1], "the other core was busy: its owner had a step open"
        with borrower.step():
            assert borrower.threads_now == 1, "the owner was busy a moment ago"


def test_a_borrowed_core_is_given_back_within_a_long_region(kernels: Kernels, tmp_path: Path) -> None:
    run = kernels.function(
        "twostroke_team_probe_tasks", (*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p)
    )
    count = 1_000_000
    done, stop = (ctypes.c_int32 * count)(), ctypes.c_int32()

    def work_long() -> None:
        with borrower.step():
            threads.append(borrower.threads_now)
            run(borrower.address, done, count, 500, ctypes.addressof(stop))

    threads: list[int] = []
    with (
        team_of(kernels, (0,), (1,), tmp_path) as borrower,
        team_of(kernels, (1,), (), tmp_path, patience_us=10_000_000) as owner,
    ):
        working = Thread(target=work_long)
        working.start()
        while not done[0]:
            time.sleep(0.001)
        with owner.step():
            stop.value = 1
            assert not done[count - 1], "the region was not over yet"
        working.join()
    assert threads == [2]
    ran = bytes(list(done))
    last = ran.rindex(1)
    assert max(ran) == 1, "no task ran twice"
    assert ran.count(0, 0, last) <= 1, "every task before the stop ran, but one that a thread took as the stop came"


def test_a_core_that_falls_idle_within_a_step_helps_with_the_rest_of_it(kernels: Kernels, tmp_path: Path) -> None:
    with (
        team_of(kernels, (0,), (1,), tmp_path, borrow_after_us=1) as borrower,
        team_of(kernels, (1,), (), tmp_path) as owner,
    ):
        with owner.step():
            borrower._begin(borrower.address, True)
            assert parts_of(kernels, borrower) == 1
            assert borrower.most_borrowed == 0
        time.sleep(0.002)
        assert parts_of(kernels, borrower) == 2
        borrower._end(borrower.address)
        assert borrower.most_borrowed == 1


def hold_once(team: Team, held: list[int]) -> None:
    with team.step():
        held.append(team.threads_now)


def test_a_core_is_borrowed_again_once_its_owner_has_been_idle(kernels: Kernels, tmp_path: Path) -> None:
    with (
        team_of(kernels, (0,), (1,), tmp_path, borrow_after_us=1) as borrower,
        team_of(kernels, (1,), (), tmp_path) as owner,
    ):
        with owner.step(), borrower.step():
            assert borrower.threads_now == 1
        time.sleep(0.001)
        with borrower.step():
            assert borrower.threads_now == 2


def test_a_step_that_does_not_want_to_borrow_leaves_idle_cores_alone(kernels: Kernels, tmp_path: Path) -> None:
    with team_of(kernels, (0,), (1,), tmp_path) as team:
        for borrows, threads in ((False, 1), (True, 2), (False, 1)):
            with team.step(borrows=borrows):
                assert parts_of(kernels, team) == threads


def test_an_owner_that_runs_nothing_for_a_while_can_lend_its_cores_at_once(kernels: Kernels, tmp_path: Path) -> None:
    with (
        team_of(kernels, (0,), (1,), tmp_path, borrow_after_us=1_000_000) as borrower,
        team_of(kernels, (1,), (0,), tmp_path, borrow_after_us=1_000_000) as owner,
    ):
        for lends, threads in ((False, 1), (True, 2), (False, 1)):
            with owner.step():
                pass
            if lends:
                owner.lend()
            with borrower.step():
                assert borrower.threads_now == threads


def test_a_neighbour_that_comes_later_can_be_borrowed_from(kernels: Kernels, tmp_path: Path) -> None:
    with team_of(kernels, (0,), (), tmp_path) as team:
        for borrowable, threads in (((1,), 2), ((1, 2), 3), ((), 1)):
            team.borrow_from(borrowable)
            with team.step():
                assert parts_of(kernels, team) == threads


def lend_and_hang(folder: Path, leases: Path, says: Connection) -> None:
    kernels = load_kernels(folder)
    assert kernels is not None
    team = Team(kernels, (0,), (1,), leases)
    with team.step():
        says.send(team.threads_now)
        time.sleep(60)


@contextmanager
def hanging_borrower(kernels: Kernels, leases: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that holds core 1 in a step that runs no region, and so never yields."""
    folder = Path(kernels.library._name).parent
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    borrower = spawn.Process(target=lend_and_hang, args=(folder, leases, theirs))
    borrower.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == 2
        yield borrower
    finally:
        borrower.kill()
        borrower.join()


def is_wanted(leases: Path, core: int) -> bool:
    """Whether the core's owner asks for it, because it has not got it."""
    return struct.unpack("=IIq", (leases / f"core-{core}").read_bytes())[0] != 0


def test_a_borrower_that_is_killed_frees_the_core(kernels: Kernels, tmp_path: Path) -> None:
    with hanging_borrower(kernels, tmp_path) as borrower, team_of(kernels, (1,), (), tmp_path) as owner:
        with owner.step():
            assert is_wanted(tmp_path, 1)
        borrower.kill()
        borrower.join()
        with owner.step():
            assert not is_wanted(tmp_path, 1)


def test_a_borrower_that_is_stopped_is_waited_for_once_and_not_for_long(kernels: Kernels, tmp_path: Path) -> None:
    with (
        hanging_borrower(kernels, tmp_path) as borrower,
        team_of(kernels, (1,), (), tmp_path) as owner,
        team_of(kernels, (2,), (1,), tmp_path) as neighbour,
    ):
        assert borrower.pid is not None
        os.kill(borrower.pid, signal.SIGSTOP)
        waits_s = [seconds_to_begin(owner) for _ in range(8)]
        assert min(waits_s[1:]) < waits_s[0] / 5
        with owner.step(), neighbour.step():
            assert parts_of(kernels, owner) == 1
            assert neighbour.threads_now == 1, "its owner is on it"


def seconds_to_begin(team: Team) -> float:
    began_s = time.perf_counter()
    with team.step():
        return time.perf_counter() - began_s


def test_a_lease_from_before_a_reboot_can_be_borrowed(kernels: Kernels, tmp_path: Path) -> None:
    (tmp_path / "core-1").write_bytes(struct.pack("=IIq", 0, 0, time.monotonic_ns() + 10**15))
    with team_of(kernels, (0,), (1,), tmp_path) as team, team.step():
        assert team.threads_now == 2


def test_a_lease_is_its_users_alone_and_takes_its_bytes_when_it_is_made(kernels: Kernels, tmp_path: Path) -> None:
    with team_of(kernels, (0,), (), tmp_path):
        status = (tmp_path / "core-0").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks > 0, "a full disk would end the process at its first step"


def test_where_leases_are_gone_a_team_goes_on_with_the_cores_it_has(
    kernels: Kernels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "leases"
    folder.mkdir()
    with team_of(kernels, (0,), (), folder) as team:
        shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                team.borrow_from((1,))
                with team.step():
                    assert parts_of(kernels, team) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_threads_that_cannot_be_started_are_an_error_and_not_the_end(kernels: Kernels) -> None:
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from twostroke.base.errors import ConfigError\n"
        "from twostroke.kernels.cpu.build import load_kernels\n"
        "from twostroke.kernels.cpu.team import Team\n"
        "kernels = load_kernels(Path(sys.argv[1]))\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)\n"
        "try:\n"
        "    Team(kernels, tuple(range(500)))\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    folder = Path(kernels.library._name).parent
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no thread team on cores" in done.stdout


def test_pinned_threads_run_on_their_cores(kernels: Kernels) -> None:
    core = min(os.sched_getaffinity(0))
    seen: list[set[int]] = []

    def work() -> None:
        with team_of(kernels, (core,), pin=True) as team, team.step():
            seen.append(os.sched_getaffinity(0))

    in_thread(work)
    assert seen == [{core}]


def in_thread(work: Callable[[], None]) -> None:
    """Affinity belongs to a thread; this one ends with its own."""
    thread = Thread(target=work)
    thread.start()
    thread.join()


def test_a_lease_directory_that_is_missing_is_named(kernels: Kernels, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone/core-0"):
        Team(kernels, (0,), (), tmp_path / "gone")
