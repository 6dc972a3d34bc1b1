"""The benchmark of the host's cost runs real processes, and counts the tokens that clients get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.flags.parser import USAGE_ERROR
from tests.trials.bench.__main__ import PROGRAM


@pytest.mark.parametrize("protocol", [pytest.param("http", marks=pytest.mark.slow), "grpc"])
def test_router_and_worker_spend_processor_time_on_every_token(protocol: str, tmp_path: Path) -> None:
    told = tmp_path / "host.json"
    flags = ["--streams", "3", "--protocol", protocol, "--step-ms", "5", "--seconds", "0.5"]
    assert PROGRAM.main(["host", *flags, "--json", str(told)]) == 0
    (row,) = json.loads(told.read_text())["costs"]
    assert row["streams"] == 3
    assert 0 < row["tokens_per_s"] <= 3 * 200 * 1.1
    assert row["router_us"] > 0
    assert row["worker_us"] > 0


@pytest.mark.parametrize(("flag", "complaint"), [("0", "1 or more"), ("a,b", "whole numbers")])
def test_what_is_no_number_of_streams_is_said(flag: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM.main(["host", "--streams", flag]) == USAGE_ERROR
    assert complaint in capsys.readouterr().err
