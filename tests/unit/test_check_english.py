"""The check of docstrings and names finds what it should, and lets the rest be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.check_english import findings, main


def texts(path: str, text: str) -> list[str]:
    return [finding.text for finding in findings(path, text)]


@pytest.mark.parametrize("opening", ["Of", "That", "Nor", "Or", "And", "As", "Where", "Who", "Whose", "By", "Until"])
@pytest.mark.parametrize(
    "code", ['"""{} it."""', 'class A:\n    """{} it."""', 'def f():\n    """{} it."""', 'a = 1\n"""{} it."""']
)
def test_a_docstring_that_continues_another_line_is_found_wherever_it_stands(opening: str, code: str) -> None:
    (found,) = findings("a.py", code.format(opening))
    assert found.line == 1 + code.count("\n")
    assert opening in found.text


@pytest.mark.parametrize("opening", ["Because", "To be", "because"])
def test_so_is_one_that_begins_with_a_reason_or_a_purpose(opening: str) -> None:
    assert len(texts("a.py", f'"""{opening} sure."""')) == 1


@pytest.mark.parametrize("whole", ["Offers it.", "To sum up.", "Thats.", "Tokens of it.", "Bytes.", "Orders it."])
def test_a_whole_sentence_is_let_be(whole: str) -> None:
    assert texts("a.py", f'"""{whole}"""\nx = "Of a text that is not a docstring."') == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("class Doorman: ...", "class Doorman: not 'doorman', say auth"),
        ("def heirs_of(): ...", "function heirs_of: not 'heirs', say successor"),
        ("def f(the_news): ...", "argument the_news: not 'news', say condition"),
        ("is_ghost = 1", "variable is_ghost: not 'ghost', say false rejections"),
        ("self._roster = 1", "attribute _roster: not 'roster', say desired state"),
        ("import a as seal", "import seal: not 'seal', say TLS"),
        ("block_name = 1", "variable block_name: not 'block name', say block hash"),
        ("class HTTPDoor: ...", "class HTTPDoor: not 'door', say endpoint"),
        ("a = 'twostroke_ghosts_total'", "metric twostroke_ghosts_total: not 'ghosts', say false rejections"),
        ("log.info('pull done door=%s', 1)", "log key door: not 'door', say endpoint"),
    ],
)
def test_a_banned_word_is_found_in_names_metrics_and_log_keys(code: str, said: str) -> None:
    assert texts("router/a.py", code) == [said]


@pytest.mark.parametrize(
    "code",
    [
        "lifetime = frontend = outdoors = background = 1",
        "def test_a_worker_that_lives_long(): ...",
        "a = heirs(door.news)",
        "print('door=1')",
        "'''A block was found at the door.'''",
        "call = line = found = rest = bound = 1",
    ],
)
def test_what_only_looks_like_one_is_let_be(code: str) -> None:
    assert texts("router/a.py", code) == []


def test_some_words_are_banned_only_as_the_whole_name_of_a_file_or_class_and_only_somewhere() -> None:
    assert texts("router/found.py", "") == ["file found: not 'found', say recovered"]
    assert texts("tests/found.py", "") == []
    assert texts("router/a.py", "class Ask: ...\nclass AskAgain: ...\nask = 1") == [
        "class Ask: not 'Ask', say GenerateRequest, QueuedRequest or Placement"
    ]
    assert texts("tools/a.py", "class Ask: ...") == []


def test_a_folder_a_proto_and_a_dashboard_are_read_too() -> None:
    assert texts("router/doors/a.py", "") == ["file doors: not 'doors', say endpoint"]
    assert texts("a.proto", "message Heir {\n  string name = 1;  // of the heir\n}") == [
        "name Heir: not 'heir', say successor"
    ]
    assert texts("deploy/a.json", '{"expr": "rate(twostroke_seats[1m])", "title": "seats"}') == [
        "metric twostroke_seats: not 'seats', say slot"
    ]


def test_a_name_counts_once_where_it_is_given_first() -> None:
    (found,) = findings("a.py", "door = 1\ndoor = 2\nuse(door)")
    assert found.line == 1


def test_what_is_found_is_printed_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a.py").write_text('"""Tokens of it."""\n')
    assert main([], tmp_path) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "a.py").write_text('"""Of it."""\ndoor = 1\n')
    assert main([], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "a.py:1: a docstring is a whole sentence: 'Of it.'" in printed
    assert "a.py:2: variable door: not 'door', say endpoint" in printed
