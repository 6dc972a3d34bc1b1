"""Builds and fetches what the first worker of a machine would, before tests need it.

python -m tests.prepare

The gate does it while the code is checked. It takes minutes in an empty cache, which would count as a test's. Pytest
rewrites the assertions of each file and keeps the outcome: in a new checkout each of its processes would do it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twostroke.config import DEFAULT_MODEL
from twostroke.models.catalog.fetch import fetch
from twostroke.models.catalog.places import cache_dir


def fetched_model() -> Path:
    """Returns the default model in float32. It is there in bfloat16, too, for workers that are asked for it."""
    fetch(DEFAULT_MODEL, "bfloat16", lambda stage, part: None)
    return fetch(DEFAULT_MODEL, "float32", lambda stage, part: None)


def build_kernels() -> None:
    """Builds the native kernels that workers choose between, measures them, and builds all parts of the faster ones."""
    from twostroke.kernels.cpu.build import SOURCES
    from twostroke.kernels.cpu.choice import choose_kernels  # loads torch, which tests of paced workers do without

    kernels = choose_kernels(cache_dir() / "kernels")
    for folder in SOURCES.iterdir() if kernels is not None else ():
        if folder.is_dir():
            kernels.need(folder.name)


def rewrite_assertions() -> None:
    """Has pytest collect all tests. What is wrong with one is told where they run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet"]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    fetched_model()
    build_kernels()
    rewrite_assertions()
