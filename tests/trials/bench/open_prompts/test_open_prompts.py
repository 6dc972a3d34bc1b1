"""The benchmark of open prompts runs real processes, and opens long prompts side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.flags.parser import USAGE_ERROR
from tests.trials.bench.__main__ import PROGRAM


@pytest.mark.slow
def test_both_workers_spend_processor_time_on_every_prompt(tmp_path: Path) -> None:
    told = tmp_path / "open.json"
    flags = ["--open", "1,4", "--prompts", "6", "--tokens", "2000"]
    assert PROGRAM.main(["open-prompts", *flags, "--json", str(told)]) == 0
    alone, several = json.loads(told.read_text())["costs"]
    assert (alone["open"], alone["prompts"]) == (1, 6)
    assert (several["open"], several["prompts"]) == (4, 8)
    for row in (alone, several):
        assert row["prefill_ms"] > 0
        assert row["decode_ms"] > 0
        assert row["first_token_s"] > 0


@pytest.mark.parametrize(("flag", "complaint"), [("0", "1 or more"), ("a,b", "whole numbers")])
def test_what_is_no_number_of_open_prompts_is_said(
    flag: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAM.main(["open-prompts", "--open", flag]) == USAGE_ERROR
    assert complaint in capsys.readouterr().err
