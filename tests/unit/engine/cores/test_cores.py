"""Which cores a worker owns, whom it may borrow from, and that nothing of it outlives the worker."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from twostroke.base.errors import ConfigError
from twostroke.engine.cores import cores as cores_module
from twostroke.engine.cores.cores import Cores, check_threads, usable_cores
from twostroke.scheduler.lateness import WaitingPrompts


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "usable_cores", lambda: [0, 1, 2, 5])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cores"


def claim(folder: Path, threads: int = 1, *, pin: bool = False, borrow: bool = True) -> Cores:
    return Cores.claim(threads, pin=pin, borrow=borrow, folder=folder)


def test_each_worker_owns_cores_of_its_own_and_gives_them_back(folder: Path) -> None:
    one, two = claim(folder, 2), claim(folder)
    assert (one.home, two.home) == ((0, 1), (2,))
    one.close()
    three = claim(folder)
    assert three.home == (0,)
    for cores in (two, three):
        cores.close()


def test_workers_that_start_at_once_never_get_the_same_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "PATIENCE_S", 100.0)  # however busy the machine is
    for _ in range(10):
        with ThreadPoolExecutor(4) as threads:
            claims = list(threads.map(lambda _: claim(folder), range(4)))
        assert sorted(core for cores in claims for core in cores.home) == [0, 1, 2, 5]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(Cores.close, claims))
        assert not folder.exists()


@pytest.mark.parametrize("first", ["lock", "owner-0"])
def test_who_comes_while_the_last_one_leaves_has_its_core_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The folder lists its files in any order; as soon as the lock has no name, another worker may come in."""
    came: list[Cores] = []
    unlink, listed = Path.unlink, Path.iterdir

    def unlink_and_come(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name == "lock" and not came:
            came.append(claim(folder))

    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), key=lambda file: file.name != first)))
    leaving = claim(folder)
    monkeypatch.setattr(Path, "unlink", unlink_and_come)
    leaving.close()
    later = claim(folder)
    assert (came[0].home, later.home) == ((0,), (1,))
    for cores in (later, *came):
        cores.close()
    assert not folder.exists()


def test_neighbours_are_the_cores_of_workers_that_live_now(folder: Path) -> None:
    one = claim(folder)
    assert one.neighbours() == ()
    two = claim(folder, 2)
    assert one.neighbours() == (1, 2)
    assert two.neighbours() == (0,)
    two.close()
    assert one.neighbours() == ()
    one.close()


def test_who_does_not_borrow_has_no_neighbours_but_lends(folder: Path) -> None:
    alone, other = claim(folder, borrow=False), claim(folder)
    assert alone.neighbours() == ()
    assert not alone.should_look
    assert other.neighbours() == alone.home
    for cores in (alone, other):
        cores.close()


def test_neighbours_are_looked_up_now_and_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = claim(folder)
    assert cores.should_look
    cores.neighbours()
    assert not cores.should_look
    monkeypatch.setattr(cores_module, "LOOK_S", 0.0)
    cores.neighbours()
    assert cores.should_look
    cores.close()


def test_the_core_of_a_killed_worker_is_free_at_once(folder: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from twostroke.engine.cores.cores import Cores\n"
        "from twostroke.scheduler.lateness import WaitingPrompts\n"
        "cores = Cores.claim(1, pin=False, borrow=True, folder=Path(sys.argv[1])); print(cores.home[0], flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        core = int(worker.stdout.readline())
        survivor = claim(folder, 3)
        assert core not in survivor.home
        assert survivor.neighbours() == (core,)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert survivor.neighbours() == ()
    successor = claim(folder)
    assert successor.home == (core,)
    for cores in (survivor, successor):
        cores.close()
    assert not folder.exists()


def test_where_too_few_cores_are_free_they_are_shared_with_a_warning_and_without_leases(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = claim(folder, 3)
    with caplog.at_level(logging.WARNING):
        late = claim(folder, 2, pin=True)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]
    assert "1 of 4 are free and --threads asks for 2" in caplog.text
    assert (late.home, late.folder, late.pin, late.neighbours()) == ((0, 1), None, False, ())
    late.close()
    assert claim(folder).home == (5,), "what it could not use it left to others"
    owner.close()


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        cores = claim(folder)
    assert str(folder) in caplog.text
    assert (cores.home, cores.folder) == ((0,), None)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_no_folder_of_ours_is_not_used(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "link":
        folder.symlink_to(elsewhere)
    else:
        folder.touch()
    with caplog.at_level(logging.WARNING):
        assert claim(folder).folder is None
    assert "is not a folder that only this user can write to" in caplog.text
    assert not list(elsewhere.iterdir())


def test_cores_that_were_claimed_before_a_failure_are_free_again(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "owner-1").mkdir()
    assert claim(folder, 2).folder is None
    after = claim(folder)
    assert (after.home, after.folder) == ((0,), folder)
    after.close()


def test_a_worker_that_was_stopped_in_the_folder_holds_nobody_up(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_module, "PATIENCE_S", 0.05)
    one, two = claim(folder), claim(folder)
    with (folder / "lock").open("w") as lock, caplog.at_level(logging.WARNING):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert one.neighbours() == ()
        assert claim(folder).folder is None
        two.close()
    assert "has been held for" in caplog.text
    one.close()
    assert not folder.exists()


def test_who_was_kept_from_trying_for_as_long_as_it_waits_tries_once_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the other one may have let go of the folder long before this one may look again."""
    one, try_lock = claim(folder), cores_module._try_lock
    monkeypatch.setattr(cores_module, "PATIENCE_S", 0.05)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def try_and_stand_still(file: int) -> bool:
            has_locked = try_lock(file)
            if not has_locked:
                time.sleep(2 * cores_module.PATIENCE_S)
                fcntl.flock(lock, fcntl.LOCK_UN)
            return has_locked

        monkeypatch.setattr(cores_module, "_try_lock", try_and_stand_still)
        one.close()
    assert not folder.exists()


def test_a_folder_that_disappears_leaves_no_neighbours_and_no_error(folder: Path) -> None:
    one, two = claim(folder), claim(folder)
    for file in folder.iterdir():
        file.unlink()
    assert one.neighbours() == ()
    for cores in (one, two):
        cores.close()


def test_more_threads_than_cores_are_refused_by_the_name_of_the_flag(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--threads 5: this machine lets us use 4 cores"):
        claim(folder, 5)
    check_threads(4)
    assert not folder.exists()


def test_only_cores_that_this_process_may_use_count() -> None:
    assert usable_cores() == sorted(os.sched_getaffinity(0))


def test_workers_measure_one_after_the_other(folder: Path) -> None:
    one, two = claim(folder), claim(folder)
    order: list[str] = []

    def measure() -> None:
        with two.measuring():
            order.append("two")

    other = threading.Thread(target=measure)
    with one.measuring():
        other.start()
        other.join(0.05)
        order.append("one")
    other.join()
    assert order == ["one", "two"]
    for cores in (one, two):
        cores.close()


def test_a_worker_that_hangs_while_it_measures_holds_up_the_others_for_a_while_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.engine.cores.cores.TURN_S", 0.01)
    one, two = claim(folder), claim(folder)
    with one.measuring(), two.measuring():
        pass
    for cores in (one, two):
        cores.close()


def test_a_worker_measures_at_once_where_the_folder_cannot_be_used(folder: Path) -> None:
    cores = claim(folder)
    (folder / "measuring").mkdir()
    with cores.measuring():
        pass
    (folder / "measuring").rmdir()
    cores.close()


def test_prompts_of_a_killed_worker_are_forgotten_with_each_core_that_it_owned(folder: Path) -> None:
    first, second, third = claim(folder), claim(folder), claim(folder)
    third.tell_prompts(WaitingPrompts(3, waiting_s=9.0))
    for killed in (second, third):
        for file in killed._owned:
            os.close(file)
    successor = claim(folder, 2)
    first.neighbours()
    assert successor.home == second.home + third.home
    assert first.prompts_beside() == WaitingPrompts()
    for cores in (first, successor):
        cores.close()


def test_workers_hear_of_the_prompts_that_wait_beside_them(folder: Path) -> None:
    one, two, proud = claim(folder), claim(folder, 2), claim(folder, borrow=False)
    for cores in (one, two, proud):
        cores.neighbours()
        cores.tell_prompts(WaitingPrompts(3, has_late=cores is two))
    beside = [cores.prompts_beside() for cores in (one, two, proud)]
    assert [each.count for each in beside] == [3, 3, 6], "one borrows nothing"
    assert [each.has_late for each in beside] == [True, False, True]
    two.tell_prompts(WaitingPrompts())
    assert one.prompts_beside() == WaitingPrompts()
    for cores in (two, one, proud):
        cores.close()
    assert not folder.exists()


def test_prompts_of_a_killed_worker_hold_nobody_up(folder: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from twostroke.engine.cores.cores import Cores\n"
        "from twostroke.scheduler.lateness import WaitingPrompts\n"
        "cores = Cores.claim(1, pin=False, borrow=True, folder=Path(sys.argv[1])); "
        "cores.tell_prompts(WaitingPrompts(2))\n"
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        survivor = claim(folder)
        survivor.neighbours()
        assert survivor.prompts_beside().count == 2
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    survivor.neighbours()
    assert survivor.prompts_beside() == WaitingPrompts()
    survivor.close()
