"""The comparison with Dynamo's replay, with a replay that is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.trials.bench import dynamo
from tests.trials.bench.__main__ import PROGRAM
from tests.trials.bench.dynamo import (
    Cell,
    Played,
    fleet_of,
    in_whole_blocks,
    played,
    played_there,
    replayed_by,
    timing_of,
)
from tools.simulate.runs import Trial, run_trial
from tools.simulate.traces.trace import Trace, TraceRow
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepTerms

TRACE = Trace("test", 512, tuple(TraceRow(10.0 * at, 1300, 4, (0, 1, 10 + at)) for at in range(3)))


def test_prompts_are_cut_to_whole_blocks_and_keep_one() -> None:
    short = TraceRow(0.0, 100, 4, (7,))
    cut = in_whole_blocks(Trace("test", 512, (*TRACE.rows, short)))
    assert [(row.input_tokens, row.blocks) for row in cut.rows] == [(1024, (0, 1))] * 3 + [(512, (7,))]


@pytest.mark.parametrize(
    ("name", "alone_ms"),
    [
        ("fixed", 410 + 18),
        ("polynomial", 16.50142 + 0.01518344 * 1024 + 4.209989e-7 * 1024**2 + 5.74 + 54.01 * 1024 / 614_400),
    ],
)
def test_a_lone_first_token_comes_after_one_step_of_each_kind(name: str, alone_ms: float) -> None:
    timing, shape = fleet_of(1, 512, 0, timing_of(name))
    trial = Trial(variant=dynamo.PORT, trace=in_whole_blocks(TRACE), shape=shape, lengths=timing.lengths)
    found = played(run_trial(trial), shape)
    assert found.ttfts_s[0] == pytest.approx(1e-3 * alone_ms, abs=1e-4)
    assert found.reuse == pytest.approx(2 * 512 / (3 * 1024)), "the last block of a whole prompt counts as computed"


def test_workers_know_polynomial_steps_within_a_tenth() -> None:
    timing, shape = fleet_of(8, 512, 0, timing_of("polynomial"))
    assert timing.lengths is not None
    for tokens in range(512, shape.step_tokens + 1, 512):
        terms = StepTerms(prompt_tokens=tokens)
        assert timing.cost.of(terms) == pytest.approx(timing.lengths.of(terms), rel=0.05)
    for share in (0.1, 0.25, 0.5):
        terms = StepTerms(streams=1, context_tokens=int(share * shape.decode_pool_tokens))
        assert timing.cost.of(terms) == pytest.approx(timing.lengths.of(terms), rel=0.1)


def test_an_unknown_timing_is_named() -> None:
    with pytest.raises(ConfigError, match="fixed, polynomial; got 'cubic'"):
        timing_of("cubic")


def test_first_tokens_within_a_hundredth_count_as_equal() -> None:
    theirs = played_there([{"ttft_s": at_s, "reused_tokens": 5, "tokens": 10} for at_s in (1.0, 2.0, 3.0, 4.0)])
    cell = Cell("test", 0.5, (0.5, 1.0), (theirs,), Played((1.0, 2.01, 3.1, 5.0), 0.5), theirs)
    assert (cell.equal_share, cell.reuse, cell.mean_s, cell.alone.mean_s) == (0.5, 0.5, 2.5, 0.75)


def test_a_python_without_the_replay_is_named() -> None:
    timing, shape = fleet_of(1, 512, 0, timing_of("fixed"))
    with pytest.raises(ConfigError, match="its replay failed"):
        replayed_by(sys.executable, TRACE, shape, timing)
    with pytest.raises(ConfigError, match="No such file"):
        replayed_by("/nowhere/python", TRACE, shape, timing)


def test_the_table_has_a_row_for_every_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        f'{{"timestamp": {at}000, "input_length": 1300, "output_length": 4, "hash_ids": [0, 1, {at}]}}\n'
        for at in range(2, 6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(
        dynamo, "replayed_by", lambda python, trace, shape, timing: Played((1.0,) * len(trace.rows), 0.25)
    )
    arguments = ["--python", "python", "--traces", str(path), "--size", "1", "--loads", "0.1,0.2", "--rounds", "1"]
    assert PROGRAM.main(["dynamo", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.count("0.2500") == 2
