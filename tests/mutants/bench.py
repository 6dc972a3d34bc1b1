"""A bench: a copy of the tree in which mutants are made one after the other, each with its test, and mended again."""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant

LEFT_OUT = (
    ".git",
    ".venv",
    ".tools",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".import_linter_cache",
)
TEST_S = 120
"""Longest time of one test: a mistake may make it wait for ever, which counts as noticed."""
RUN_S = 600.0
"""Longest time of the tests of one mutant."""
ALL_S = 3600.0
"""Longest time of the tests of all mutants together."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest; others say that it could not run them."""


class Verdict(enum.StrEnum):
    NOTICED = "noticed"
    UNNOTICED = "not noticed"
    BROKEN = "not run"


@dataclass(frozen=True, slots=True)
class Result:
    mutant: Mutant
    verdict: Verdict
    seconds: float
    said: str
    """The last line of pytest's output."""


@dataclass(frozen=True, slots=True)
class TestRun:
    status: int
    output: str

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Bench:
    def __init__(self, root: Path) -> None:
        """`root` is made, as a copy of the tree."""
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self.root = root

    def try_out(self, mutant: Mutant) -> Result:
        """Makes the mutant, runs its test, and mends the tree."""
        path, began_s = self.root / mutant.file, time.monotonic()
        sound, wrong = path.read_text(), mutant.text_in(self.root)
        try:
            self._write(path, wrong)
            run = self.run([mutant.test])
        finally:
            self._write(path, sound)
        verdicts = {PASSED: Verdict.UNNOTICED, FAILED: Verdict.NOTICED}
        return Result(mutant, verdicts.get(run.status, Verdict.BROKEN), time.monotonic() - began_s, run.last_line)

    def run(self, tests: Sequence[str], within_s: float = RUN_S) -> TestRun:
        """Runs tests in the copy, with its own code and no other."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout",
            str(TEST_S),
            "--tb=line",
        ]
        environment = os.environ | {"PYTHONPATH": str(self.root)}
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=within_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TestRun(FAILED, f"it did not end within {within_s:g} s")
        return TestRun(done.returncode, done.stdout + done.stderr)

    def _write(self, path: Path, text: str) -> None:
        """Python takes compiled code for that of a file of the same size and second: none is left."""
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
