"""Runs the gate's tests, and the few that failed once more with nothing beside them.

python -m tests.gate FILE   writes what the tests took to FILE, as JUnit's XML; exit status 1 where a test failed twice

Three processes share two processors with each other, with the clusters that they start and with whatever else the
machine does: tests wait for a third of their time, and two processes would leave the processors idle as long. A test
that passes alone was turned red by that load, not by the code: it is named at the end, so that it is mended, and the
gate passes. Code that is broken fails alone as well. Where many tests fail, none is run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST_AGAIN = 8
"""Failed tests that are run once more; where more have failed, it is not the load."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")
SIDE_BY_SIDE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
ALONE = ("--last-failed", "--last-failed-no-failures", "none", "-n", "0")
TESTS_FAILED = 1
"""Pytest's exit status where tests have failed, and nothing else is wrong."""


def main(junit: str) -> int:
    status = pytest("--cache-clear", *SIDE_BY_SIDE, f"--junitxml={junit}")
    if status != TESTS_FAILED:
        return status
    failed = sorted(json.loads(FAILED.read_text()))
    if len(failed) > MOST_AGAIN:
        print(f"{len(failed)} tests failed: none is run again, since load alone never turns so many red")
        return status
    print(f"run once more, alone: {', '.join(failed)}", flush=True)
    status = pytest(*ALONE)
    if status == 0:
        print("passed alone, so the machine's load had turned them red; mend them:", *failed, sep="\n  ")
    return status


def pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
