"""The grid of cells: which rival is the best, when a cell is won, and at which pace its load comes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cluster.values.worker_counts import LatencyTargets
from tests.trials.bench.__main__ import PROGRAM
from tests.trials.bench.grid import Axes, Cell, Place, pace_of, requests_of, verdict
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.reports.summary import Summary, oracle_rate_of, summarise
from tools.simulate.runs import Trial, paced, run_trial
from tools.simulate.traces.oracle import LeastRecent, found_in_turns

AXES = Axes(traces="conversation", requests=60)
TRACE = requests_of("conversation", 2, AXES)
SHAPE = FleetShape(prefill=2, decode=2)
RUN = summarise(
    run_trial(Trial(variant="kv", trace=TRACE, shape=SHAPE)),
    1.0,
    LatencyTargets(ttft_s=None, itl_s=None),
    oracle_rate_of(TRACE, SHAPE),
)


def of(variant: str, p90_s: float, mean_s: float, completed: int = RUN.completed) -> Summary:
    return dataclasses.replace(
        RUN, variant=variant, ttft_p90_s=p90_s, ttft_mean_s=mean_s, oracle_share=1.0, completed=completed
    )


def cell(ours: Summary, *rivals: Summary) -> Cell:
    return Cell(Place("trace", 2, 0.5), ours, rivals)


def test_each_number_has_its_own_best_rival() -> None:
    found = cell(of("kv", 1.0, 1.0), of("quick", 0.8, 4.0), of("even", 2.0, 0.5))
    assert (found.p90.rival, found.p90.ratio) == ("quick", 1.25)
    assert (found.mean.rival, found.mean.ratio) == ("even", 2.0)
    assert not found.is_won
    assert cell(of("kv", 1.0, 1.0), of("slow", 1.0, 1.0)).is_won


def test_few_hits_lose_a_cell_unless_there_are_none_to_have() -> None:
    ours, rival = of("kv", 1.0, 1.0), of("rival", 2.0, 2.0)
    assert not cell(dataclasses.replace(ours, oracle_share=0.94), rival).is_won
    assert cell(dataclasses.replace(ours, oracle_share=None), rival).is_won


def test_who_leaves_requests_undone_is_no_rival_and_wins_nothing() -> None:
    refusing = of("refusing", 0.1, 0.1, completed=RUN.requests - 1)
    assert cell(of("kv", 1.0, 1.0), refusing, of("rival", 2.0, 2.0)).p90.rival == "rival"
    assert not cell(dataclasses.replace(refusing, variant="kv"), of("rival", 2.0, 2.0)).is_won


def test_the_verdict_counts_won_cells_and_says_the_worst() -> None:
    won = cell(of("kv", 1.0, 1.0), of("rival", 2.0, 2.0))
    lost = cell(dataclasses.replace(of("kv", 3.0, 1.0), oracle_share=0.9), of("rival", 2.0, 2.0))
    expected = "1 of 2 cells won; worst p90 1.500x and mean 0.500x of the best rival, least hits 90.0% of the oracle's"
    assert verdict([won, lost]) == expected


def test_a_load_is_the_share_of_time_that_perfect_reuse_leaves_to_compute() -> None:
    rows = paced(TRACE, pace_of(0.5, TRACE, SHAPE)).rows
    found = found_in_turns(TRACE, [LeastRecent(SHAPE.prefill * SHAPE.prefill_pages)])
    work_s = sum(
        SHAPE.cost.of_prompt(row.input_tokens - cached, cached, SHAPE.step_tokens)
        for row, cached in zip(rows, found, strict=True)
    )
    span_s = rows[-1].timestamp_s - rows[0].timestamp_s
    assert work_s / (SHAPE.prefill * span_s) == pytest.approx(0.5)


def test_the_grid_has_a_cell_for_every_trace_size_and_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, written = tmp_path / "own.jsonl", tmp_path / "out.json"
    rows = [
        {
            "timestamp": 700 * at,
            "input_length": 512 * (3 + at % 7),
            "output_length": 20,
            "hash_ids": [at % 3, *range(100 * (at + 1), 100 * (at + 1) + 2 + at % 7)],
        }
        for at in range(40)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    axes = ["--traces", f"{trace}@1,code-agent", "--sizes", "1,2", "--loads", "0.4", "--requests", "30"]
    assert PROGRAM.main(["grid", *axes, "--policies", "least-requests,llm-d,kv", "--json", str(written)]) == 0
    cells = json.loads(written.read_text())["cells"]
    places = [(each["place"]["trace"], each["place"]["size"]) for each in cells]
    assert places == [("own", 1), ("own", 2), ("code-agent", 1), ("code-agent", 2)]
    for each in cells:
        assert [run["variant"] for run in each["rivals"]] == ["least-requests", "llm-d"]
        best_s = min(run["ttft_p90_s"] for run in each["rivals"])
        assert each["p90"]["ratio"] == pytest.approx(each["ours"]["ttft_p90_s"] / best_s)
    assert "of 4 cells won" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sizes", ""], "--sizes needs a number"),
        (["--loads", "0"], "--loads must be positive"),
        (["--policies", "kv"], "--policies needs a rival"),
        (["--policies", "best"], "--policies must be of"),
        (["--requests", "1"], "--requests must be 2 or more"),
    ],
)
def test_what_makes_no_cell_is_said_in_a_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAM.main(["grid", "--traces", "conversation", *arguments]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown
    assert shown.count("\n") == 1
