"""The rows of mutants hold: each mistake can be made in the tree as it is, and its test is there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.mutants.bench import Result, Verdict
from tests.mutants.mutant import Mutant
from tests.mutants.run import chosen, summary
from tests.mutants.table import MUTANTS

LEAST = 60


def row(tmp_path: Path, **changes: str) -> Mutant:
    (tmp_path / "product.py").write_text("limit = 3\nlimit_s = 3\n")
    (tmp_path / "test_product.py").write_text("def test_it() -> None: ...\n")
    fields = {
        "name": "limit",
        "claim": "there is a limit",
        "file": "product.py",
        "old": "limit = 3",
        "new": "limit = 4",
        "test": "test_product.py::test_it[1]",
    }
    return Mutant(**fields | changes)


def test_every_mutant_can_be_made_and_names_a_test() -> None:
    assert [problem for mutant in MUTANTS if (problem := mutant.problem()) is not None] == []


def test_there_are_enough_mutants_and_none_twice() -> None:
    assert len(MUTANTS) >= LEAST
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert [
        change for change, count in Counter((each.file, each.old, each.new) for each in MUTANTS).items() if count > 1
    ] == []


def test_a_row_that_has_rotted_says_why(tmp_path: Path) -> None:
    assert row(tmp_path).problem(tmp_path) is None
    assert row(tmp_path).text_in(tmp_path) == "limit = 4\nlimit_s = 3\n"
    wrong = {
        "has 'limit = 5' 0 times": {"old": "limit = 5"},
        "has '3' 2 times": {"old": "3"},
        "it changes nothing": {"new": "limit = 3"},
        "no Python any more": {"new": "limit = ("},
        "there is no other.py": {"file": "other.py"},
        "there is no test_other.py": {"test": "test_other.py::test_it"},
        "has no test_other": {"test": "test_product.py::test_other"},
    }
    for why, changes in wrong.items():
        problem = row(tmp_path, **changes).problem(tmp_path)
        assert problem is not None
        assert why in problem


def test_mutants_are_chosen_by_name_or_file() -> None:
    assert chosen([]) == list(MUTANTS)
    first = MUTANTS[0]
    assert first in chosen([first.name])
    assert {each.file for each in chosen([first.file])} == {first.file}
    assert chosen(["no-such-mutant"]) == []


def test_what_nobody_noticed_comes_first_with_its_claim(tmp_path: Path) -> None:
    good, bad = row(tmp_path), row(tmp_path, name="another")
    told = summary(
        [Result(good, Verdict.NOTICED, 1.0, "1 failed"), Result(bad, Verdict.UNNOTICED, 2.0, "1 passed")], 3.0
    )
    lines = told.splitlines()
    assert lines[0].startswith("another")
    assert lines[-1] == "1 of 2 mutants noticed, 3 s"
    assert "another: there is a limit" in lines
