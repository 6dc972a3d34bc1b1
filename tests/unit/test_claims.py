"""Every claim has a test that is there, and says so where the gate does not run it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?!Claim )(?P<claim>[^|]*) \| (?P<shown>(?:[^|]|\\\|)*) \|$", re.MULTILINE)
ROWS = [match.groupdict() for match in ROW.finditer((ROOT / "docs/claims.md").read_text())]
OUTSIDE = re.compile(r"\bslow\b|\bhand\b|make (?:faults|slow)")
"""Words with which a row says that the gate leaves something out."""


def named_in(shown: str) -> list[str]:
    """Returns the files and folders of tests that a row names."""
    return re.findall(r"`(tests/[\w./]+)`", shown)


def is_slow(source: str) -> bool:
    """Returns whether the gate leaves out every test of a file."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    tests = [function for function in functions if function.name.startswith("test")]
    marked = [any(ast.unparse(each) == "pytest.mark.slow" for each in test.decorator_list) for test in tests]
    return (bool(tests) and all(marked)) or bool(re.search(r"^pytestmark\b.*\bslow\b", source, re.MULTILINE))


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) > 50


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["claim"][:60])
def test_a_claim_names_tests_that_are_there(row: dict[str, str]) -> None:
    assert named_in(row["shown"]) != []
    assert [path for path in named_in(row["shown"]) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["claim"][:60])
def test_a_claim_says_which_of_its_tests_the_gate_leaves_out(row: dict[str, str]) -> None:
    files = [ROOT / path for path in named_in(row["shown"]) if path.endswith(".py")]
    folders = [ROOT / path for path in named_in(row["shown"]) if not path.endswith(".py")]
    left_out = [file for file in files if is_slow(file.read_text())]
    left_out += [folder for folder in folders if not any(folder.rglob("test_*.py"))]
    assert not left_out or OUTSIDE.search(row["shown"])


def test_a_file_with_only_slow_tests_is_noticed() -> None:
    slow = "@pytest.mark.slow\nasync def test_one(): ...\n"
    assert is_slow(slow)
    assert is_slow("pytestmark = [pytest.mark.slow]\ndef test_one(): ...\n")
    assert not is_slow(f"{slow}def test_two(): ...\n")
