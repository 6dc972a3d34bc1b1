"""The benchmark of the console runs a real router, with and without open pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.flags.parser import USAGE_ERROR
from tests.trials.bench.__main__ import PROGRAM
from tests.trials.bench.console.clients import CALLS

SMALL = ["--workers", "8", "--rate", "1500", "--pages", "6", "--rounds", "3", "--seconds", "1.5"]
NOTICEABLE = 1.5
"""Processor time with pages over that without. Here it is 1.1, as rounds are short and other processes run; where each
call of a page took 50 ms it would be 2."""


@pytest.mark.slow
def test_open_pages_take_little_from_a_router_under_load(tmp_path: Path) -> None:
    told = tmp_path / "console.json"
    assert PROGRAM.main(["console", *SMALL, "--json", str(told)]) == 0
    measured = json.loads(told.read_text())
    rounds = measured["rounds"]
    assert [len(rounds[kind]) for kind in ("without", "with_pages")] == [3, 3]
    assert all(each["answers"] > 1 and each["cpu_ms"] > 0 for kind in rounds for each in rounds[kind])
    assert all(each["page_calls"] >= len(CALLS) and each["page_bytes"] > 1000 for each in rounds["with_pages"])
    assert all(each["page_calls"] == 0 for each in rounds["without"])
    assert 0 < measured["ratios"]["cpu"] < NOTICEABLE


def test_pages_ask_as_often_as_their_scripts() -> None:
    scripts = Path("router/console/static")
    assert f"PERIOD_MS = {1000 * CALLS[0][1]:g};" in (scripts / "live.js").read_text()
    assert f"PERIOD_MS = {1000 * CALLS[1][1]:g};" in (scripts / "requests.js").read_text()


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM.main(["console", "--pages", "0"]) == USAGE_ERROR
    assert "--pages must be 1 or more" in capsys.readouterr().err
