"""`tests.trials.bench grammars`: a whole run over the real model, too short to say anything of speed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.trials.bench.grammars import add_arguments, run


@pytest.mark.slow
def test_steps_with_and_without_grammars_are_timed(
    smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smollm2_dir.is_dir()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    file = tmp_path / "grammars.json"
    short = ["--streams", "2", "--context", "16", "--repeats", "3"]
    assert run(parser.parse_args([*short, "--dtype", "float32", "--json", str(file)])) == 0
    assert "with a grammar each and without" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["temperature"] for row in rows] == [0.0, 1.0]
    for row in rows:
        assert row["plain_ms"] > 0
        assert row["mask_p99_us"] >= row["mask_us"] > 0
        assert 0 <= row["forced_share"] < 1
