"""Ranks are processes: they compute in step, and any one's death, freeze or failure ends all, also within a step."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.ranks.jobs import FROZEN_S, CannotLoad, LoadsForever, Meetings, WritesTo, fail, meet, pids_of_children
from tests.unit.ranks.sums_job import Sums, add
from twostroke.base.errors import ConfigError, RankLost
from twostroke.kernels.cpu.build import Kernels
from twostroke.ranks import processes as processes_module
from twostroke.ranks.processes import RankCare, RankProcesses
from twostroke.ranks.rank import BEAT_S, MOST_PROBLEM_BYTES, AsideEnd, RankJob

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0


@contextmanager
def running(
    kernels: Kernels, ranks: int, job: RankJob | None = None, descriptors: tuple[int, ...] = ()
) -> Iterator[tuple[RankProcesses, list[RankLost]]]:
    """Yields the ranks, and what is told of their loss."""
    lost: list[RankLost] = []
    care = RankCare(FROZEN_S, on_lost=lost.append)
    processes = RankProcesses(kernels, job or Meetings(), ranks, 0, care, descriptors)
    try:
        yield processes, lost
    finally:
        processes.close()


def wait_for(what: list[RankLost]) -> RankLost:
    end_s = time.monotonic() + WAIT_S
    while not what:
        assert time.monotonic() < end_s, "nobody noticed"
        time.sleep(0.02)
    return what[0]


def is_named(error: RankLost, rank: int, ranks: int, pid: int, what: str) -> bool:
    return error.message == f"rank {rank} of {ranks} (pid {pid}) {what}"


DIED, FROZEN = "died: signal 9", f"is frozen: no sign of life for {FROZEN_S:g} s"
BROKEN = pytest.mark.parametrize(("number", "what"), [(signal.SIGKILL, DIED), (signal.SIGSTOP, FROZEN)])


def test_a_job_that_cannot_be_sent_is_an_error_and_nobody_waits(kernels: Kernels) -> None:
    class Local(Meetings):
        """No other process can import it."""

    before = pids_of_children()
    with pytest.raises(Exception, match="Local"), running(kernels, 2, Local()):
        pass
    assert pids_of_children() <= before


def test_ranks_do_large_work_aside_while_steps_go_on(kernels: Kernels) -> None:
    with running(kernels, 3) as (processes, lost):
        processes.wait_until_ready()
        aside = threading.Thread(target=processes.aside, args=(("await_step", bytes(8 << 20)),))
        aside.start()
        while aside.is_alive():  # one step is enough for a rank that has begun
            processes.send(("meet", 0.0))
            processes.group.meet()
            processes.finish()
        assert not lost


def test_all_ranks_compute_the_steps_that_the_first_one_sends_and_what_one_cannot_do_aside_is_refused(
    kernels: Kernels,
) -> None:
    with running(kernels, 3, Sums()) as (processes, lost):
        processes.wait_until_ready()
        descriptors = len(os.listdir("/proc/self/fd"))
        for value in (1.0, 2.0, 5.0):
            processes.send(value)
            assert add(processes.group, value).tolist() == [6 * value] * 5
            processes.finish()
            with pytest.raises(ConfigError, match="2 of the other ranks could not do it: TypeError"):
                processes.aside("no number")
        processes.send(2.0)
        assert add(processes.group, 2.0).tolist() == [12.0] * 5
        processes.finish()
        assert not lost
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_ends_of_work_aside_are_read_as_they_come() -> None:
    read_end, write_end = os.pipe()
    told = ["", "too large é" * 400, "", "x"]
    for problem in told:
        AsideEnd(problem).write(write_end)
    os.close(write_end)
    came, ends = bytearray(), list[str]()
    while some := os.read(read_end, 7):
        came += some
        ends += [end.problem for end in AsideEnd.read(came)]
    os.close(read_end)
    assert [len(end) for end in ends] == [0, len(ends[1]), 0, 1]
    assert told[1].startswith(ends[1][:-1])
    assert len(ends[1].encode()) <= MOST_PROBLEM_BYTES + 2


def test_work_aside_ends_with_the_ranks(kernels: Kernels) -> None:
    before = pids_of_children()
    with running(kernels, 2) as (processes, lost):
        processes.wait_until_ready()
        (pid,) = pids_of_children() - before
        descriptors = len(os.listdir("/proc/self/fd"))
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(RankLost, match=DIED):
            processes.aside(("await_step", b""))
        assert wait_for(lost)
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_work_aside_ends_where_its_ranks_are_closed_meanwhile(kernels: Kernels) -> None:
    raised: list[RankLost] = []

    def work() -> None:
        with pytest.raises(RankLost) as error:
            processes.aside(("await_step", b""))
        raised.append(error.value)

    with running(kernels, 2) as (processes, _):
        processes.wait_until_ready()
        aside = threading.Thread(target=work, daemon=True)
        aside.start()
        time.sleep(0.3)  # the rank has begun
    assert wait_for(raised)


@BROKEN
def test_a_rank_that_dies_or_freezes_between_steps_ends_all_and_is_named(
    kernels: Kernels, number: int, what: str
) -> None:
    before = pids_of_children()
    with running(kernels, 2) as (processes, lost):
        processes.wait_until_ready()
        (pid,) = pids_of_children() - before
        os.kill(pid, number)
        assert is_named(wait_for(lost), 1, 2, pid, what)
        with pytest.raises(RankLost, match=re.escape(what)):
            processes.group.meet()
        with pytest.raises(RankLost, match=re.escape(what)):
            processes.send(("meet", 1.0))
    assert pids_of_children() == before


@BROKEN
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_dies_or_freezes_within_a_step_ends_the_waits_of_all(
    kernels: Kernels, number: int, what: str, rank: int
) -> None:
    before = pids_of_children()
    with running(kernels, 3) as (processes, lost):
        processes.wait_until_ready()
        pid = sorted(pids_of_children() - before)[rank - 1]
        processes.send(("wait", float(rank)))
        timer = threading.Timer(0.3, os.kill, (pid, number))
        timer.start()
        with pytest.raises(RankLost) as raised:
            processes.group.meet()
        assert is_named(raised.value, rank, 3, pid, what)
        assert is_named(wait_for(lost), rank, 3, pid, what)
        timer.join()
    assert pids_of_children() == before


def test_a_rank_that_beats_and_does_not_come_to_a_round_is_lost_and_one_that_waits_is_not(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "LATE_S", FROZEN_S)
    before = pids_of_children()
    with running(kernels, 2) as (processes, lost):
        processes.wait_until_ready()
        processes.send(("meet", 0.0))
        time.sleep(FROZEN_S + 0.3)  # the other rank waits for the first one
        assert not lost
        processes.group.meet()
        processes.finish()
        (pid,) = processes.pids
        assert {pid} == pids_of_children() - before
        processes.send(("wait", 1.0))
        with pytest.raises(RankLost) as raised:
            processes.group.meet()
        assert is_named(raised.value, 1, 2, pid, f"hangs: the first rank has waited for it for {FROZEN_S:g} s")


def test_a_rank_that_comes_late_to_round_after_round_is_not_lost(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "LATE_S", FROZEN_S)
    looks = Counter[int]()

    def awaited_round(number: int) -> int:
        looks[number] += 1
        return looks[number]

    with running(kernels, 2) as (processes, lost):
        processes.wait_until_ready()
        monkeypatch.setattr(processes.group, "awaited_round", awaited_round)
        time.sleep(FROZEN_S + 4 * BEAT_S)
        assert looks[1] > FROZEN_S / BEAT_S / 2
        assert not lost
        monkeypatch.setattr(processes.group, "awaited_round", lambda number: 7)
        assert "hangs" in wait_for(lost).message


def test_a_rank_that_fails_in_a_step_says_why(kernels: Kernels) -> None:
    with running(kernels, 2) as (processes, lost):
        processes.wait_until_ready()
        processes.send(("fail", 1.0))
        with pytest.raises(RankLost, match=r"rank 1 of 2 \(pid \d+\) failed: ValueError: this step is too much"):
            meet(processes.group, 0)
        wait_for(lost)


def test_where_the_first_rank_fails_in_a_step_the_others_are_ended(kernels: Kernels) -> None:
    before = pids_of_children()
    with running(kernels, 2) as (processes, lost):
        processes.wait_until_ready()
        processes.send(("fail", 0.0))
        with pytest.raises(ValueError, match="too much") as raised:
            fail(processes.group, 0.0)
        error = processes.lose(f"the first rank failed: {raised.value}")
        assert error.message == wait_for(lost).message == "the first rank failed: this step is too much"
        while pids_of_children() != before:
            time.sleep(0.02)


def test_what_a_rank_cannot_load_is_one_line_for_the_user(kernels: Kernels) -> None:
    with running(kernels, 2, CannotLoad()) as (processes, lost):
        with pytest.raises(ConfigError, match=r"^rank 1 of 2 \(pid \d+\) cannot load: the weights are not there$"):
            processes.wait_until_ready()
        assert not lost, "the caller knows"


def test_a_rank_that_dies_while_it_loads_is_lost(kernels: Kernels) -> None:
    before = pids_of_children()
    with running(kernels, 2, LoadsForever()) as (processes, _):
        (pid,) = pids_of_children() - before
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(RankLost, match=r"died: signal 9$"):
            processes.wait_until_ready()


def test_a_rank_that_freezes_while_it_loads_is_lost(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "FROZEN_LOADING_S", 1.0)
    before = pids_of_children()
    with running(kernels, 2, LoadsForever()) as (processes, _):
        (pid,) = pids_of_children() - before
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"is frozen: no sign of life for 1 s$"):
            processes.wait_until_ready()


def test_ranks_get_the_descriptors_that_their_job_needs(kernels: Kernels) -> None:
    read, write = os.pipe()
    with running(kernels, 3, WritesTo(write), (write,)) as (processes, _):
        processes.wait_until_ready()
        assert sorted(os.read(read, 10).decode()) == ["1", "2"]
    os.close(read)
    os.close(write)


def test_closing_leaves_no_process_descriptor_or_thread(kernels: Kernels) -> None:
    """What leaks does so in every round; what another test of this process closes or opens late does so once."""
    children = pids_of_children()
    for is_ready in (True, False):
        counts = []
        for _ in range(3):
            with running(kernels, 2) as (processes, lost):
                if is_ready:
                    processes.wait_until_ready()
            assert not lost
            assert pids_of_children() == children
            counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        for kind, seen in zip(("descriptors", "threads"), zip(*counts, strict=True), strict=True):
            assert any(later <= earlier for earlier, later in pairwise(seen)), f"{kind} grow in every round: {seen}"


@contextmanager
def first_rank(ranks: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yields a first rank in a process of its own, and descriptors of the processes of the others."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.unit.ranks.jobs import main; main()", str(ranks)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin:
        try:
            pidfds = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
            yield process, pidfds
        finally:
            process.kill()
    for pidfd in pidfds:
        os.close(pidfd)


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def have_ended(pidfds: list[int]) -> bool:
    return all(select.select([pidfd], [], [], WAIT_S)[0] for pidfd in pidfds)


@pytest.mark.parametrize("is_in_step", [False, True])
def test_the_death_of_the_first_rank_ends_the_others_also_a_stopped_one(is_in_step: bool) -> None:
    with first_rank(3) as (process, pidfds):
        if is_in_step:
            say(process, "hang")
        signal.pidfd_send_signal(pidfds[1], signal.SIGSTOP)
        process.kill()
        assert have_ended(pidfds)


def test_a_first_rank_that_was_stopped_itself_blames_nobody() -> None:
    """All stop, as where a container is frozen: the others have not beaten meanwhile, and go on a moment later."""
    with first_rank(2) as (process, pidfds):
        process.send_signal(signal.SIGSTOP)
        signal.pidfd_send_signal(pidfds[0], signal.SIGSTOP)
        time.sleep(FROZEN_S + 1)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        signal.pidfd_send_signal(pidfds[0], signal.SIGCONT)
        assert process.stdout is not None
        for _ in range(2):
            say(process, "step")
            assert process.stdout.readline() == "computed\n"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
        assert have_ended(pidfds)
