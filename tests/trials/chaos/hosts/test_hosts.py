"""Three hosts out of namespaces: another token stays out, pages cross; a pulled cable loses nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trials.chaos import page_section
from tests.trials.chaos.hosts.network import why_not
from tests.trials.chaos.hosts.report import Facts, written
from tests.trials.chaos.hosts.result import Result
from tests.trials.chaos.hosts.sightings import Sightings

CHECKOUT = Path(__file__).parents[4]
LIMIT_S = 570
"""Several times what it takes on a machine that does nothing else."""


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


def test_a_wait_beyond_its_bound_and_a_client_that_had_to_turn_are_problems_and_the_page_names_them() -> None:
    good = Result(fault="decode: cut", host="d", run=1, bound_s=8.0, streams=9, open_streams=3, recovery_s=2.5)
    assert good.verdict == "ok"
    late = dataclasses.replace(good, run=2, recovery_s=8.1, turned=("long-0 went to another router: nothing",))
    assert len(late.problems) == 2
    assert dataclasses.replace(good, open_streams=0).problems == ("no stream was open",)
    page_section.check(CHECKOUT / "docs" / "multi-host.md", page_section.HOSTS)
    facts = Facts(before="Before.", machine="a machine", date="today", duration_s=60.0, load=1.0)
    told = written([late, good], facts)
    assert (
        told.index("| decode: cut | 1 |") < told.index("| decode: cut | 2 |") < told.index("- **decode: cut**, run 2")
    )
    assert "18 of 18 streams identical, 1 clients had to turn" in told


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_three_hosts_serve_across_and_a_pulled_cable_loses_nothing(
    tmp_path: Path,
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-P", "-m", "tests.trials.chaos.hosts", "--quick", "--logs", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Nodes with another token were refused" in done.stderr
    assert "of pages went from host to host over TCP" in done.stderr
