from __future__ import annotations

import json
import random
from typing import Any

import pytest

from router.text.output.output_formats import TOOL_FORMATS
from router.text.output.parts import Part
from tests.conformance.make_tool_outputs import FILE, HAND_WRITTEN, lines
from tests.conformance.reading import joined, parsed, parser_of
from tests.conformance.record_outputs import recorded_lines

COMPOSED, WRITTEN = (
    [json.loads(line) for line in file.read_text().split("\n") if line] for file in (FILE, HAND_WRITTEN)
)
RECORDED = [*WRITTEN, *COMPOSED, *recorded_lines()]
KINDS = sorted({line["format"] for line in RECORDED})
EACH_COUNT = pytest.mark.parametrize("answers", [60, pytest.param(300, marks=pytest.mark.slow)])
"""Hostile answers of each format: few in the gate, and many in the slow suite."""


def test_the_file_has_what_its_script_writes() -> None:
    assert lines() == COMPOSED
    assert len(RECORDED) >= 200
    assert {each.name for each in TOOL_FORMATS} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_answers_mean_the_parts_that_are_recorded_with_them(kind: str) -> None:
    for line in of_kind(kind):
        assert parsed(kind, [line["output"]], is_cut=is_cut(line)) == line["parts"], line["output"]


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_split_into_two_pieces_changes_the_parts(kind: str, every: int) -> None:
    for number, line in enumerate(of_kind(kind)):
        output = line["output"]
        for cut in range(1 + number % every, len(output), every):
            pieces = [output[:cut], output[cut:]]
            assert parsed(kind, pieces, is_cut=is_cut(line)) == line["parts"], pieces


@pytest.mark.parametrize("kind", KINDS)
def test_single_characters_and_random_pieces_mean_the_same_parts(kind: str) -> None:
    draw = random.Random(kind)
    for line in of_kind(kind):
        output = line["output"]
        assert parsed(kind, output, is_cut=is_cut(line)) == line["parts"], output
        for _ in range(2):
            cuts = sorted(draw.choices(range(len(output) + 1), k=6))
            pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
            assert parsed(kind, pieces, is_cut=is_cut(line)) == line["parts"], pieces


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_beginning_are_a_beginning_of_the_parts(kind: str) -> None:
    """An answer that is resumed is parsed again from its beginning: what was sent must not depend on what follows."""
    for line in of_kind(kind):
        parser, sent = parser_of(kind), list[Part]()
        for char in line["output"]:
            sent += parser.feed(char)
            begun, whole = joined(sent), line["parts"]
            assert begun[:-1] == whole[: max(len(begun) - 1, 0)], begun
            if begun:
                last, full = begun[-1], whole[len(begun) - 1]
                assert full[:-1] == last[:-1]
                assert full[-1].startswith(last[-1]), (last, full)


@EACH_COUNT
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_the_model_said_is_in_some_part(kind: str, answers: int) -> None:
    """Words are counted, because framing, whitespace next to it, and the writing of values may go."""
    for seed in range(answers):
        output = hostile(random.Random(f"{kind} {seed}"), kind)
        words = [word for part in parsed(kind, [output]) for text in part[1:] for word in word_list(text)]
        for word in set(word_list(output)):
            assert words.count(word) >= word_list(output).count(word), output


@EACH_COUNT
@pytest.mark.parametrize("kind", KINDS)
def test_random_pieces_of_framing_mean_the_same_however_they_are_cut(kind: str, answers: int) -> None:
    for seed in range(answers):
        draw = random.Random(f"{kind} {seed}")
        output = hostile(draw, kind)
        whole = parsed(kind, [output])
        assert parsed(kind, output) == whole, output
        cut = draw.randrange(len(output) + 1)
        assert parsed(kind, [output[:cut], output[cut:]]) == whole, (output[:cut], output[cut:])


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [line for line in RECORDED if line["format"] == kind]


def is_cut(line: dict[str, Any]) -> bool:
    return bool(line.get("cut"))


FRAGMENTS = (
    *"{}[]()<>\"'\\:,;=| \n",
    "<tool_call>", "</tool_call>", "<function=", "<function=ping>", "</function>", "<parameter=", "<parameter=w1>",
    "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>",
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<think>", "</think>",
    '{"name": "ping", "arguments": {', '{"name": "search", "parameters": {"query": "', "[ping(", "[search(query=",
    "commentary to=functions.ping", "analysis", "true", "None", "-1.5e3", "\\n", "\\u00e9",
)  # fmt: skip


def hostile(draw: random.Random, kind: str) -> str:
    """Returns an answer of fragments in any order, with words between them that are found again by their numbers."""
    pieces = []
    for rank in range(draw.randrange(1, 14)):
        pieces.append(draw.choice(FRAGMENTS))
        if draw.random() < 0.3:
            pieces.append(f"W{rank}W")
    return "".join(pieces)


def word_list(text: str) -> list[str]:
    return [word for word in text.replace("\\", " ").split("W") if word.isdigit() and len(word) <= 2]
