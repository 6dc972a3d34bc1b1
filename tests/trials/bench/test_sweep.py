"""Choices of who computes: cells, their ratios, and the worst of those that tell something."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import mean

import pytest

from cluster.values.worker_counts import LatencyTargets
from tests.trials.bench.__main__ import PROGRAM
from tests.trials.bench.sweep import BLOCK_TOKENS, Cell, Place, requests_at, verdict
from tools.simulate.fleet.shape import FleetShape

SHAPE = FleetShape(prefill=2, decode=2, block_size=BLOCK_TOKENS)
PLACE = Place(prompt_tokens=4096, load=0.5, bytes_per_s=2e9)


def cell(local: float, remote: float, ours: float, prompt_tokens: int = 4096) -> Cell:
    goodput = {"always-local": local, "always-remote": remote, "kv": ours}
    place = dataclasses.replace(PLACE, prompt_tokens=prompt_tokens)
    return Cell(place=place, requests_per_s=10.0, promise=LatencyTargets(ttft_s=1.0, itl_s=0.1), goodput=goodput)


def test_ours_is_held_against_the_better_rule_of_each_cell() -> None:
    assert cell(4.0, 8.0, 6.0).ratio == 0.75
    assert cell(8.0, 4.0, 10.0).ratio == 1.25
    assert cell(0.0, 0.0, 1.0).ratio == 1.0


def test_a_cell_that_nobody_serves_does_not_decide() -> None:
    cells = [cell(4.0, 8.0, 7.2), cell(0.2, 0.4, 0.1, prompt_tokens=9)]
    assert verdict(cells).startswith("worst: 0.900 of the better fixed rule, at 4096 tokens, load 0.5, 2 GB/s")
    assert "1 of 2 cells left out" in verdict(cells)
    assert verdict(cells[1:]) == "no fixed rule serves 10% of requests in time in any cell"


def test_a_cell_offers_the_load_that_it_says_and_shares_nothing() -> None:
    trace = requests_at(PLACE, SHAPE, requests=2000, output_tokens=50)
    span_s = trace.rows[-1].timestamp_s
    work_s = sum(SHAPE.cost.of_prompt(row.input_tokens, 0, SHAPE.step_tokens) for row in trace.rows)
    assert work_s / (2 * span_s) == pytest.approx(0.5, rel=0.1)
    assert mean(row.output_tokens for row in trace.rows) == pytest.approx(50, rel=0.05)
    blocks = [block for row in trace.rows for block in row.blocks]
    assert len(set(blocks)) == len(blocks)
    slower = dataclasses.replace(PLACE, bytes_per_s=1.0)
    assert requests_at(slower, SHAPE, 50, 50) == requests_at(PLACE, SHAPE, 50, 50), "all bandwidths, the same requests"


def test_a_sweep_holds_ours_against_both_fixed_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, page = tmp_path / "out.json", tmp_path / "out.html"
    axes = ["--prompt-tokens", "1024", "--loads", "0.5,1.1", "--bandwidths", "2", "--requests", "40"]
    files = ["--json", str(written), "--html", str(page)]
    assert PROGRAM.main(["sweep", *axes, "--output-tokens", "20", *files]) == 0
    found = json.loads(written.read_text())
    assert len(found["cells"]) == 2
    for each in found["cells"]:
        assert set(each["goodput"]) == {"always-local", "always-remote", "kv"}
        assert not each["is_telling"] or each["ratio"] >= found["worst_ratio"]
    assert page.read_text().count("</figure>") == 1
    assert "of the better fixed rule, at 1024 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["sweep", "--loads", "0"], "--loads must be positive"),
        (["sweep", "--prompt-tokens", ""], "--prompt-tokens needs a number"),
        (["sweep", "--prefill", "0"], "--prefill must be at least 1"),
        (["sweep", "--slo-ttft", "1e-6"], "--slo-ttft 1e-06 is impossible"),
        (["sweep", "--slo-itl", "1e-6"], "a step with one stream takes"),
        (["sweep", "--requests", "1"], "--requests must be at least 2"),
        (["sweep", "--prompt-tokens", "inf"], "--prompt-tokens must be numbers"),
    ],
)
def test_what_cannot_be_swept_is_said_in_a_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAM.main(arguments) == 2
    shown = capsys.readouterr().err
    assert complaint in shown
    assert shown.count("\n") == 1
