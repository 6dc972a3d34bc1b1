"""Three hosts out of namespaces: another token stays out, pages cross, and a cable that is pulled loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.hosts.network import why_not
from cluster.hosts.sightings import Sightings

LIMIT_S = 280


def test_two_lives_of_one_worker_and_one_that_comes_back_are_noticed() -> None:
    sightings = Sightings()
    first, second = f"1.{0:016x}", f"2.{0:016x}"
    sightings.see("router", [("decode-0", first), ("decode-1", first)])
    sightings.see("router", [("decode-0", second), ("decode-1", "")])
    sightings.see("other router", [("decode-0", first)])
    assert not sightings.problems
    sightings.see("router", [("decode-0", first)])
    sightings.see("other router", [("decode-0", first), ("decode-0", second)])
    assert len(sightings.problems) == 2


def test_three_hosts_serve_across_and_a_pulled_cable_loses_nothing(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-P", "-m", "cluster.hosts", "--quick", "--logs", str(tmp_path)]
    checkout = str(Path(__file__).parents[2])
    done = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": checkout},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Nodes with another token were refused" in done.stderr
    assert "of pages went from host to host over TCP" in done.stderr
