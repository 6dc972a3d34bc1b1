"""The benchmark of tiers sees what a disk below the pages is good for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trials.bench.__main__ import PROGRAM

MODEL = "paced:step_ms=1,prefill_tokens_per_s=4000,page_bytes=4096,vocab=50000,max_model_len=2048"
SMALL = ["--model", MODEL, "--chats", "6", "--turns", "2", "--unique", "2", "--answer", "8"]


@pytest.mark.slow
def test_chats_find_more_with_a_disk_than_without_and_say_the_same(tmp_path: Path) -> None:
    told = tmp_path / "tiers.json"
    assert PROGRAM.main(["tiers", *SMALL, "--variants", "none,disk", "--json", str(told)]) == 0
    without, disk = json.loads(told.read_text())["trials"]
    assert disk["hit_rate"] > without["hit_rate"]
    assert disk["answers"] == without["answers"]
    assert disk["loaded"]["disk"] > 0
    assert without["loaded"] == {"host": 0.0, "disk": 0.0}


def test_a_variant_that_is_none_is_refused_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM.main(["tiers", "--variants", "none,tape"]) != 0
    assert "--variants must be of none, host, disk, both, all-pages, got 'tape'" in capsys.readouterr().err


@pytest.mark.slow
def test_prompts_that_nobody_repeats_are_measured_in_turns(tmp_path: Path) -> None:
    told = tmp_path / "in_turns.json"
    flags = ["--variants", "none,disk", "--unique", "4", "--in-turns", "--json", str(told)]
    assert PROGRAM.main(["tiers", *SMALL[:6], "--answer", "8", *flags]) == 0
    assert all(0 < ratio < 100 for ratio in json.loads(told.read_text())["ratios"].values())
