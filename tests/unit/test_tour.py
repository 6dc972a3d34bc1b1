"""The tour names files, classes and functions that exist, and at each stop about as many lines as one reads at once."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs/tour.md").read_text()
HEART_LINES = 40
"""Lines of the first name of a stop at most, with signature and docstring: about twenty are essential."""
MOST_LINES = 90
"""Lines of all names of one stop at most."""


@dataclass
class Stop:
    number: int
    title: str
    names: list[tuple[str, str]] = field(default_factory=list)
    """File and name of each thing to read."""
    remembers: int = 0


def stops(text: str) -> list[Stop]:
    found: list[Stop] = []
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        number, _, title = part.partition("\n")[0].partition(". ")
        stop = Stop(int(number), title, remembers=part.count("**Remember:**"))
        for item in re.findall(r"^\* (.*(?:\n  .*)*)", part, flags=re.MULTILINE):
            path, *names = re.findall(r"`([^`]+)`", item)
            stop.names += [(path, name) for name in names]
        found.append(stop)
    return found


@functools.cache
def definitions(path: str) -> dict[str, int]:
    """How many lines define each `name` and `Class.name` of a file."""
    found: dict[str, int] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        found |= _defined(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": lines for each in node.body for name, lines in _defined(each).items()}
    return found


def _defined(node: ast.stmt) -> dict[str, int]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name: lines}
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return {name: lines}
    return {}


STOPS = stops(TOUR)


def test_the_tour_has_ten_to_fourteen_stops_in_order_and_each_has_one_thing_to_remember() -> None:
    assert 10 <= len(STOPS) <= 14
    assert [stop.number for stop in STOPS] == list(range(1, len(STOPS) + 1))
    assert [stop.title for stop in STOPS if stop.remembers != 1 or not stop.names] == []


@pytest.mark.parametrize("stop", STOPS, ids=[stop.title for stop in STOPS])
def test_what_a_stop_names_is_there_and_short_enough_to_read(stop: Stop) -> None:
    lines = [definitions(path)[name] for path, name in stop.names]
    assert lines[0] <= HEART_LINES
    assert sum(lines) <= MOST_LINES


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert "RouterCore.generate" in definitions("router/serving/dispatcher.py")
    assert "RouterCore.degenerate" not in definitions("router/serving/dispatcher.py")
    with pytest.raises(FileNotFoundError):
        definitions("router/serving/despatcher.py")


def test_methods_named_anywhere_are_defined_in_a_file_that_the_tour_names() -> None:
    files = set(re.findall(r"`([\w/]+\.py)`", TOUR))
    there = set[str]().union(*(definitions(path) for path in files))
    assert set(re.findall(r"`(_?[A-Z]\w+\.\w+)`", TOUR)) <= there


def test_the_files_of_a_chat_are_there_once_and_in_the_order_of_the_stops() -> None:
    rows = re.findall(r"^\| (\d+) \| (`.*) \|$", TOUR, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    files = [path for _, row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert [path for path in files if not (ROOT / path).is_file()] == []
    assert len(set(files)) == len(files)
    hearts = {stop.names[0][0] for stop in STOPS if stop.number <= len(rows)}
    assert hearts <= set(files)
