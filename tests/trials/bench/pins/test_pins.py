"""The benchmark of pins tells a kept prompt from one that was evicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trials.bench.__main__ import PROGRAM

PACED = "paced:step_ms=1,prefill_tokens_per_s=4000,max_model_len=1024,page_bytes=1024"
SMALL = f"--model {PACED} --kv-cache-memory 200K --served-model-name tiny"


@pytest.mark.slow
def test_a_pinned_prompt_is_found_and_one_that_was_only_used_is_not(tmp_path: Path) -> None:
    told = tmp_path / "pins.json"
    flags = ["--rounds", "1", "--words", "100", "--flood", "9"]
    assert PROGRAM.main(["pins", *flags, "--serve", SMALL, "--json", str(told)]) == 0
    found = json.loads(told.read_text())
    assert found["cached"]["unpinned"] == [0]
    assert found["cached"]["pinned"][0] > 300
    assert found["cached"]["killed"][0] > 300
    assert found["is_same"]
    assert found["ratio"] < 1
