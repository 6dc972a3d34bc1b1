"""The check of what tests take holds each folder to its budget, on a slow machine and on a quick one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.durations import Run, exceeded, places, read_run, read_table, table_of, written

FILES = {"tests/unit/b/test_b.py": 0.4, "tests/unit/a/test_a.py": 9.0, "tests/unit/a/test_long.py": 60.0}
CLUSTERS = {"tests/cluster/test_a.py": 10.0, "tests/cluster/test_b.py": 20.0, "tests/cluster/test_c.py": 30.0}
BEFORE = Run(0.003, {"tests/unit/a": 10.0, "tests/unit/b": 0.4, "tests/cluster": 100.0}, FILES | CLUSTERS)
TABLE = table_of(BEFORE)


def test_the_table_is_read_as_it_was_written() -> None:
    assert read_table(written(TABLE)) == TABLE


def test_the_run_that_was_written_is_within_its_budgets() -> None:
    assert exceeded(BEFORE, TABLE) == []


def test_a_folder_that_takes_more_than_four_times_as_much_is_named() -> None:
    after = BEFORE._replace(folders={**BEFORE.folders, "tests/unit/a": 41.0})
    assert exceeded(after, TABLE) == ["tests/unit/a takes 41 s of the processor, and its budget is 40 s"]


def test_a_slow_machine_takes_longer_for_all_and_is_forgiven() -> None:
    slow = Run(0.012, {folder: taken_s * 4 for folder, taken_s in BEFORE.folders.items()}, {})
    assert exceeded(slow, TABLE) == []


def test_a_quick_machine_is_not_allowed_more() -> None:
    quick = Run(0.0015, {"tests/unit/a": 20.5}, {})
    assert exceeded(quick, TABLE) == ["tests/unit/a takes 41 s of the processor, and its budget is 40 s"]


def test_a_short_folder_may_take_some_seconds_and_so_may_a_new_one() -> None:
    after = BEFORE._replace(folders={"tests/unit/b": 29.9, "tests/unit/new": 29.9})
    assert exceeded(after, TABLE) == []
    after = BEFORE._replace(folders={"tests/unit/new": 31.0})
    assert exceeded(after, TABLE) == ["tests/unit/new takes 31 s of the processor, and its budget is 30 s"]


def test_the_whole_may_not_take_more_than_twice_as_much() -> None:
    after = BEFORE._replace(folders={folder: taken_s * 2.1 for folder, taken_s in BEFORE.folders.items()})
    assert exceeded(after, TABLE) == ["the whole gate takes 232 s of the processor, and its budget is 221 s"]


def test_long_files_come_first_and_clusters_beside_what_computes() -> None:
    assert list(places(TABLE)) == [
        "tests/cluster/test_c.py", "tests/unit/a/test_long.py", "tests/cluster/test_b.py", "tests/unit/a/test_a.py",
        "tests/cluster/test_a.py",
    ]  # fmt: skip


def test_the_exit_status_says_whether_a_budget_is_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durations, "TABLE", tmp_path / "durations.toml")
    (tmp_path / "before.xml").write_text(_junit(processor_s=10))
    (tmp_path / "after.xml").write_text(_junit(processor_s=41))
    assert durations.main(["--write", str(tmp_path / "before.xml")]) == 0
    assert durations.main([str(tmp_path / "before.xml")]) == 0
    assert durations.main([str(tmp_path / "after.xml")]) == 1
    assert "tests/unit/a takes 41 s" in capsys.readouterr().out


def test_each_file_notes_what_it_and_its_processes_take(tmp_path: Path) -> None:
    """What it waits for takes nothing."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "busy").mkdir()
    (tmp_path / "idle").mkdir()
    (tmp_path / "busy" / "test_busy.py").write_text(BUSY)
    (tmp_path / "idle" / "test_idle.py").write_text("import time\n\ndef test_idle(): time.sleep(1)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir=.", "--junitxml=run.xml"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([*command, "busy", "idle"], cwd=tmp_path, env=environment, check=True)
    run = read_run((tmp_path / "run.xml").read_text())
    assert 0.4 < run.folders["busy"] < 5
    assert run.folders["idle"] < 0.4
    assert run.files["idle/test_idle.py"] >= 1


CONFTEST = """
from tests.processor_time import FileTimes

def pytest_configure(config):
    config.pluginmanager.register(FileTimes())
"""

BUSY = """
import subprocess, sys
CODE = "import time\\nwhile time.process_time() < 0.25: pass"

def test_ended_child():
    subprocess.run([sys.executable, "-c", CODE], check=True)

def test_living_child():
    child = subprocess.Popen([sys.executable, "-c", CODE + "\\nprint(flush=True)\\ntime.sleep(60)"], stdout=-1)
    child.stdout.readline()
    test_living_child.kept = child
"""


def _junit(*, processor_s: float) -> str:
    noted = {"file": "tests/unit/a/test_it.py", "processor_s": processor_s, "clock_s": 20.0, "loop_s": 0.003}
    properties = "".join(f'<property name="{name}" value="{value}" />' for name, value in noted.items())
    return f"<testsuites><testcase><properties>{properties}</properties></testcase></testsuites>"
