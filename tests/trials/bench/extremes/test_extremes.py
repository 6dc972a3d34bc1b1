"""The benchmark of extreme schemas: a whole run, too short to say anything of delays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.flags.parser import USAGE_ERROR
from router.preparation.grammar_process import load_tokenizer
from router.text.structured.compile import CompiledGrammar, compile_output
from tests.trials.bench.__main__ import PROGRAM
from tests.trials.bench.extremes.measure import COMPUTING, EXTREME, KINDS, ORDINARY
from tests.trials.bench.extremes.outputs import HOSTILE, output_of
from twostroke.models.catalog import places


@pytest.mark.slow
@pytest.mark.parametrize("part", ["router", "worker"])
def test_each_kind_of_round_is_timed(part: str, smollm2_dir: Path, tmp_path: Path) -> None:
    if places.locate("smollm2-135m", "bfloat16") is None:
        pytest.skip("NOT CHECKED: SmolLM2 in bfloat16 is not on this machine")
    told = tmp_path / "extremes.json"
    flags = ["--parts", part, "--rounds", "1", "--seconds", "1", "--streams", "2"]
    assert PROGRAM.main(["extremes", *flags, "--json", str(told)]) == 0
    rows = json.loads(told.read_text())["rows"]
    assert [row["beside"] for row in rows] == list(KINDS) == [ORDINARY, EXTREME, COMPUTING]
    for row in rows:
        assert row["count"] > 0
        assert row["p50_ms"] <= row["p99_ms"]
    assert rows[0]["delay_p50_ms"] == 0


def test_the_hostile_grammar_compiles(smollm2_dir: Path) -> None:
    """Otherwise its rounds would be beside nothing."""
    compiled = compile_output(output_of("grammar", HOSTILE), load_tokenizer(str(smollm2_dir)))
    assert isinstance(compiled, CompiledGrammar)


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM.main(["extremes", "--rounds", "0"]) == USAGE_ERROR
    assert "--rounds must be 1 or more" in capsys.readouterr().err
