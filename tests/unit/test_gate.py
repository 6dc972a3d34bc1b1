"""The gate runs failed tests once more: load turns no gate red, and what is broken stays red."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAILS_ONCE = """
from pathlib import Path

def test_it():
    seen = Path("seen")
    is_first = not seen.exists()
    seen.touch()
    assert not is_first
"""
FAILS = "def test_it():\n    assert False\n"
FAILS_OFTEN = "".join(f"def test_{number}():\n    assert False\n" for number in range(9))


@pytest.mark.parametrize(
    ("tests", "status", "said"),
    [
        (FAILS_ONCE, 0, "passed alone, so the machine's load had turned them red; mend them:\n  test_this.py::test_it"),
        (FAILS, 1, "run once more, alone: test_this.py::test_it"),
        (FAILS_OFTEN, 1, "9 tests failed: none is run again"),
        ("import nowhere\n", 2, "1 error"),
    ],
    ids=["once", "always", "many", "uncollected"],
)
def test_what_failed_once_is_run_again(tmp_path: Path, tests: str, status: int, said: str) -> None:
    (tmp_path / "test_this.py").write_text("def test_other():\n    pass\n" + tests)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gate", "ran.xml"],
        cwd=tmp_path,
        env={name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
        | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, said in ran.stdout) == (status, True), ran.stdout + ran.stderr
    assert (tmp_path / "ran.xml").exists()
