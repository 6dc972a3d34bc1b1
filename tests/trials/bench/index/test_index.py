"""`tests.trials.bench index`: its content is what it says, a wrong answer does not pass, and a whole run over a few
blocks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.trials.bench.index import trial
from tests.trials.bench.index.content import DEEP_BLOCKS, SHALLOW_BLOCKS, Content, Question
from tests.trials.bench.index.options import IndexOptions
from tests.trials.bench.index.session import run_session
from twostroke.base.errors import ConfigError

SMALL = Content(workers=5, blocks=10 * DEEP_BLOCKS, seed=3)


def options(**changes: object) -> IndexOptions:
    return IndexOptions(
        **{  # type: ignore[arg-type]
            "workers": 5,
            "blocks": 10 * DEEP_BLOCKS,
            "lookups": 20,
            "seed": 3,
            "dynamo_python": None,
            "json_path": None,
        }
        | changes
    )


def test_what_is_stored_follows_on_what_the_worker_has_and_adds_up() -> None:
    held: dict[int, set[bytes]] = {worker: set() for worker in range(5)}
    for stored in SMALL.stored():
        assert stored.parent is None or stored.parent in held[stored.worker]
        assert not held[stored.worker] & set(stored.block_hashes)
        held[stored.worker].update(stored.block_hashes)
    different = len(set().union(*held.values()))
    assert different == pytest.approx(SMALL.blocks, rel=0.2)


@pytest.mark.parametrize("depth", [SHALLOW_BLOCKS, DEEP_BLOCKS])
@pytest.mark.parametrize("popular", [False, True])
def test_the_right_answer_to_a_question_is_what_was_stored(depth: int, popular: bool) -> None:
    held: dict[int, set[bytes]] = {worker: set() for worker in range(5)}
    for stored in SMALL.stored():
        held[stored.worker].update(stored.block_hashes)
    for question in SMALL.questions(depth, 10, popular=popular):
        scanned = {
            worker: next(place for place, name in enumerate(question.block_hashes) if name not in hashes)
            for worker, hashes in held.items()
        }
        assert question.depths == scanned
        assert max(scanned.values()) == depth


def test_a_wrong_answer_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Question(block_hashes=[b"x" * 16], depths={0: 1})
    monkeypatch.setattr(Content, "questions", lambda *_, **__: iter([wrong]))
    with pytest.raises(SystemExit, match="wrong answer"):
        trial.measure("twostroke", SMALL, 1)


def test_a_whole_run_says_what_each_block_costs_and_how_long_lookups_take(tmp_path: Path) -> None:
    assert run_session(options(json_path=str(tmp_path / "index.json"))) == 0
    said = json.loads((tmp_path / "index.json").read_text())
    (found,) = said["trials"]
    assert found["subject"] == "twostroke"
    assert found["holdings"] > said["blocks"]
    assert found["bytes_per_holding"] > 0
    assert found["ingest_s"] > 0
    assert [(lookup["depth"], lookup["popular"]) for lookup in found["lookups"]] == [
        (depth, popular) for depth in (SHALLOW_BLOCKS, DEEP_BLOCKS) for popular in (False, True)
    ]
    assert all(0 < lookup["p50_s"] <= lookup["p99_s"] for lookup in found["lookups"])


def test_a_subject_that_is_not_there_is_named_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"dynamo could not be measured .*ai-dynamo-runtime"):
        run_session(options(dynamo_python=sys.executable))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 2}, "--workers must be 3 or more, got 2"),
        ({"blocks": 100}, "--blocks must be 7500 or more, got 100"),
        ({"lookups": 1}, "--lookups must be 2 or more, got 1"),
        ({"dynamo_python": "/nowhere/python"}, "--dynamo-python /nowhere/python: is not a program"),
    ],
)
def test_flags_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)
