"""Programs that are no Python packages: on PATH, in `.tools/` (see fetch_tools.py), or the test is skipped, loudly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".tools"
HOW_TO_GET = {
    "kubectl": "`make .tools`, or kubectl 1.30 or newer on PATH",
    "promtool": "`make .tools`, or Debian's package prometheus",
    "prometheus": "`make .tools`, or Debian's package prometheus",
    "buildah": "Debian's package buildah",
    "nft": "Debian's package nftables",
    "rsync": "Debian's package rsync",
    "sshd": "Debian's package openssh-server (it need not run)",
}


def find_tool(name: str) -> Path | None:
    found = shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + str(FOLDER))
    return None if found is None else Path(found)


def tool(name: str) -> Path:
    """The program, or the test that asks for it is skipped with what to do."""
    found = find_tool(name)
    if found is None:
        pytest.skip(f"NOT CHECKED: {name} is missing; get it with {HOW_TO_GET.get(name, f'a package that has {name}')}")
    return found
