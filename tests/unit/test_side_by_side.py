"""Processes that share one collection run every test once, and one that dies fails the test that it ran."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
import os
from pathlib import Path

import pytest

LOG = Path(__file__).with_name("log")

def write(*words):
    with LOG.open("a") as file:
        print(*words, os.getpid(), file=file)

@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    write("up", tmp_path_factory.mktemp("shared"))
    yield
    write("down", "-")

@pytest.fixture(autouse=True)
def noted(request, shared):
    write("test", request.node.nodeid)

write("collected", "-")
"""
FILE = """
import os, time
import pytest

def test_first():
    print("printed by", __name__)
    os.system("echo printed by a child of " + __name__)

def test_second(tmp_path):
    time.sleep(0.05)
    (tmp_path / "mine").touch(exist_ok=False)
    {then}

@pytest.mark.skip
def test_third():
    pass

def test_fourth():
    pass
"""
THENS = {"fails": "assert not tmp_path", "dies": "os._exit(7)", "killed": "os.kill(os.getpid(), 9)"}
UNDONE = """
import gc

class Circle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        raise ValueError("undone")

def test_it():
    gc.disable()
    Circle()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("ran")
    (folder / "conftest.py").write_text(CONFTEST)
    for name in (*THENS, *(f"passes_{number}" for number in range(5))):
        (folder / f"test_{name}.py").write_text(FILE.format(then=THENS.get(name, "pass")))
    command = ["-m", "pytest", "-p", "tests.side_by_side", "--processes", "3", "--junitxml=ran.xml"]
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    return folder, done


def logged(folder: Path) -> list[tuple[str, str, str]]:
    return [(kind, what, pid) for kind, what, pid in map(str.split, (folder / "log").read_text().splitlines())]


def test_every_test_runs_once_and_those_of_a_file_in_one_process(
    ran: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = ran
    assert "1 failed, 21 passed, 8 skipped, 2 errors" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    begun = [(what.partition("::"), pid) for kind, what, pid in logged(folder) if kind == "test"]
    assert len(begun) == len(set(begun)) == 8 * 3
    runners: dict[str, set[str]] = defaultdict(set)
    for (file, _, _), pid in begun:
        runners[file].add(pid)
    assert {file for file, pids in runners.items() if len(pids) > 1} == {"test_dies.py", "test_killed.py"}
    cases = ElementTree.parse(folder / "ran.xml").iter("testcase")
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == 8 * 4


def test_one_process_collects_and_those_that_run_tests_share_nothing_that_they_make(
    ran: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = ran
    lines = logged(folder)
    assert len([kind for kind, _, _ in lines if kind == "collected"]) == 1
    made = [(what, pid) for kind, what, pid in lines if kind == "up"]
    assert len(made) == len(dict(made)) == len({pid for _, pid in made}) == 5
    assert len([kind for kind, _, _ in lines if kind == "down"]) == 3, "each that did not die takes down what it set up"


def test_a_process_that_dies_fails_its_test_and_what_a_failed_one_printed_is_shown(
    ran: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = ran
    assert "ERROR test_dies.py::test_second - the process that ran this test has ended: 7" in done.stdout
    assert "ERROR test_killed.py::test_second - the process that ran this test has ended: -9" in done.stdout
    assert "FAILED test_fails.py::test_second - AssertionError" in done.stdout
    last_failed = (folder / ".pytest_cache" / "v" / "cache" / "lastfailed").read_text()
    assert all(f"test_{name}.py::test_second" in last_failed for name in THENS)
    assert "printed by" not in done.stdout, "only what a failed test has printed is shown"


def test_what_only_the_end_of_a_process_shows_fails_its_last_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(UNDONE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.side_by_side", "-c", "/dev/null", "--rootdir=.", "-Werror"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ERROR test_it.py::test_it - the process that ran this test has ended: 1" in done.stdout
    assert "ValueError: undone" in done.stderr


def environment() -> dict[str, str]:
    outer = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    return outer | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
