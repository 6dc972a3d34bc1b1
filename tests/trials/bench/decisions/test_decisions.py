"""The benchmark of decisions decides for real, in a fleet of the size that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.flags.parser import USAGE_ERROR
from tests.trials.bench.__main__ import PROGRAM

SMALL = ["decisions", "--blocks", "8000", "--workers", "8", "--decisions", "120"]


@pytest.mark.parametrize("workers", [8, 60])
def test_both_lengths_of_prompts_are_timed(workers: int, tmp_path: Path) -> None:
    told = tmp_path / "decisions.json"
    assert PROGRAM.main([*SMALL, "--workers", str(workers), "--json", str(told)]) == 0
    short, long = json.loads(told.read_text())["decisions"]
    assert (short["blocks"], long["blocks"]) == (24, 750)
    for row in (short, long):
        assert 0 < row["p50_ms"] <= row["p99_ms"]


@pytest.mark.slow
def test_the_memory_of_an_index_grows_with_its_blocks(tmp_path: Path) -> None:
    told = tmp_path / "decisions.json"
    large = ["--blocks", "200000", "--workers", "8", "--decisions", "2"]
    assert PROGRAM.main(["decisions", *large, "--json", str(told)]) == 0
    assert json.loads(told.read_text())["memory"]["index_bytes"] > 200_000 * 20


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--workers", "3"], "--workers must be 4 or more"),
        (["--blocks", "10"], "--blocks must be 7500 or more"),
        (["--decisions", "1"], "--decisions must be 2 or more"),
    ],
)
def test_what_cannot_be_measured_is_said(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM.main([*SMALL, *flags]) == USAGE_ERROR
    assert complaint in capsys.readouterr().err
