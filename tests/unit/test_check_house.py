"""The check of the house finds what has grown, and lets the rest be."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from tests.check_house import (
    MOST_FILES,
    MOST_LINES,
    Source,
    arrows,
    arrows_up,
    doubled_classes,
    findings,
    footprint,
    mutual_pairs,
    problems,
    trunk_lines,
    updated,
)

TABLE: Mapping[str, Any] = {
    "branches": {"tiers": {"folders": ["a/tiers/"], "words": [r"\btiers?\b"], "most": 1}},
    "arrows_up": {"a": 0},
    "mutual_pairs": {"a": 0},
    "doubled": {"classes": 0},
}


def source(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text))


def said(*files: Source, table: Mapping[str, Any] = TABLE) -> list[str]:
    return problems(list(findings(files, table)), table)


def test_a_footprint_counts_the_files_outside_that_name_a_branch() -> None:
    files = [source("a/x.py", "tier = 1"), source("a/y.py", "'Tiers'"), source("a/tiers/z.py", "tier = 1")]
    assert footprint(files, [r"\btiers?\b"], ["a/tiers/"]) == ["a/x.py", "a/y.py"]
    assert footprint([source("a/frontier.py", "frontier = 1")], [r"\btiers?\b"], []) == []


def test_a_branch_that_one_more_file_names_is_a_problem() -> None:
    one, other = source("a/x.py", "tier = 1"), source("a/y.py", "tier = 2")
    assert said(one) == []
    assert said(one, other) == ["tiers: 2 files outside its folders name it, at most 1 (tests/house.toml, [branches])"]


def test_arrows_are_between_rooms_and_whole_names_of_packages_count() -> None:
    files = [
        source("a/b/x.py", "from a.c.y import Y\nfrom a.b.z import Z\nfrom ab.c import D"),
        source("a/c/y.py", "import a.d\nfrom a import d"),
    ]
    assert arrows(files, "a") == {("b", "c"): 1, ("c", "d"): 2}


@pytest.mark.parametrize(
    ("found", "up"),
    [
        ({("a", "b"): 1, ("b", "c"): 1, ("a", "c"): 1}, []),
        ({("a", "b"): 5, ("b", "a"): 1}, [("b", "a")]),
        ({("a", "b"): 5, ("b", "c"): 5, ("c", "a"): 1}, [("c", "a")]),
    ],
)
def test_what_runs_up_is_the_least_of_a_circle(found: dict[tuple[str, str], int], up: list[tuple[str, str]]) -> None:
    assert arrows_up(found) == up


def test_two_rooms_that_import_each_other_are_one_pair() -> None:
    assert mutual_pairs({("a", "b"): 1, ("b", "a"): 3, ("a", "c"): 1}) == [("a", "b")]


def test_a_class_of_two_files_is_found_unless_it_is_private() -> None:
    files = [source("a/x.py", "class A: ...\nclass _B: ..."), source("a/y.py", "class A: ...\nclass _B: ...")]
    assert doubled_classes(files) == {"A": ["a/x.py", "a/y.py"]}


def test_a_long_file_needs_an_exception_that_goes_when_nothing_needs_it() -> None:
    file = source("a/x.py", "x = 1\n" * (MOST_LINES + 1))
    (problem,) = said(file)
    assert problem.startswith(f"a/x.py: {MOST_LINES + 1} lines in this file, at most {MOST_LINES}")
    allowing = {**TABLE, "files": {"a/x.py": {"most": MOST_LINES + 1, "reason": "It is one table."}}}
    assert said(file, table=allowing) == []
    (left,) = said(source("a/x.py", "x = 1"), table=allowing)
    assert left == "tests/house.toml: [files] allows a/x.py more than it needs: the exception can go"


def test_long_functions_full_folders_and_classes_of_many_methods_are_found() -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(31))
    long = "def f():\n" + "    pass\n" * 60
    files = [source(f"a/x{number}.py", "") for number in range(MOST_FILES)]
    assert said(*files, source("a/__init__.py", "")) == []
    found = said(*files, source("a/y.py", f"class A:\n{methods}\n{long}"))
    assert [problem.partition(",")[0] for problem in found] == [
        "a: 13 files in this folder",
        "a/y.py:A: 31 methods in this class",
        "a/y.py:f: 61 lines in this function",
    ]


def test_an_update_lowers_numbers_and_raises_none() -> None:
    text = (
        '[branches.tiers]\nfolders = ["a/tiers/"]\nwords = ["tier"]\nmost = 7\n\n[arrows_up]\na = 3\n\n[mutual_pairs]\n'
    )
    text += '\n[doubled]\nclasses = 0\n\n[files]\n"a/x.py" = { most = 900, reason = "It is one table." }\n'
    files = [source("a/x.py", "tier = 1\n" * 500)]
    table = tomllib.loads(updated(text, files))
    assert table["branches"]["tiers"]["most"] == 1
    assert table["arrows_up"]["a"] == 0
    assert table["files"]["a/x.py"]["most"] == 500
    longer = [source("a/x.py", "tier = 1\n" * 950)]
    assert tomllib.loads(updated(text, longer))["files"]["a/x.py"]["most"] == 900


def test_the_trunk_is_what_belongs_to_no_branch_no_table_and_no_tool() -> None:
    files = [source(path, "a = 1\nb = 2\n") for path in ("a/x.py", "a/tiers/x.py", "a/table.py", "a/c/x.py", "b/x.py")]
    table = {
        "branches": {"tiers": {"folders": ["a/tiers/"]}},
        "trunk": {"packages": ["a/"], "besides": ["a/c/"]},
        "tables": ["a/table.py"],
    }
    assert trunk_lines(files, table) == 2
