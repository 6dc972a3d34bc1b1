"""Custom tools: the model sees a function with one text, and the client gets that text, whole or piece by piece."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from router.dialects.openai.custom_tools import CustomInput, custom_function, custom_input, keeps_inputs


def in_pieces(arguments: str, *cuts: int) -> str:
    text, places = CustomInput(), [0, *sorted(cuts), len(arguments)]
    pieces = [text.feed(arguments[begin:end]) for begin, end in itertools.pairwise(places)]
    return "".join(pieces) + text.end()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (r'{"input": "a\n\"b\" \ud83d\ude00"}', 'a\n"b" 😀'),
        ('{ "input" :"a", "more": 1}', "a"),
        ('{"first": 1, "input": "late"}', "late"),
        ('{"input": "cut', "cut"),
        (r'{"input": "cut \u00', "cut "),
        (r'{"input": "\ud83d alone"}', "\ufffd alone"),
        (r'{"input": "\ud83d\ud83d\ude00"}', "\ufffd😀"),
        (r'{"input": "no \q escape \n"}', "no \\q escape \n"),
        ('{"input": 5}', '{"input": 5}'),
        ("*** Begin", "*** Begin"),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_the_input_is_the_same_in_any_pieces(arguments: str, expected: str) -> None:
    assert custom_input(arguments) == expected
    assert in_pieces(arguments, *range(1, len(arguments))) == expected


def test_random_texts_are_read_as_json_reads_them() -> None:
    rng = random.Random(7)
    units = ["\\", "u", "d", "8", "3", "c", '"', "n", " ", "\\ud83d", "\\ude00", "\\n", "é"]
    read = 0
    for _ in range(3000):
        arguments = '{"input": "' + "".join(rng.choices(units, k=10)) + '"}'
        got = custom_input(arguments)
        assert in_pieces(arguments, rng.randrange(len(arguments))) == got
        assert got.encode().decode() == got
        try:
            expected = json.loads(arguments)["input"]
        except ValueError:
            continue
        read += 1
        assert got == expected.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert read > 100


def test_the_input_streams_before_the_arguments_are_whole() -> None:
    text = CustomInput()
    assert [text.feed(piece) for piece in ('{"inp', 'ut": "a', "b", "\\", 'n"', "}")] == ["", "a", "b", "", "\n", ""]


def test_arguments_that_never_become_a_text_are_not_read_again_and_again() -> None:
    text = CustomInput()
    assert {text.feed("x") for _ in range(100_000)} == {""}
    assert text.end() == "x" * 100_000


def test_a_regex_is_kept_to_and_a_grammar_in_lark_is_told() -> None:
    regex = custom_function("f", "Does.", {"syntax": "regex", "definition": "a|b"})["function"]
    assert regex["parameters"]["properties"]["input"] == {"type": "string", "pattern": "^(?:a|b)$"}
    lark = custom_function("f", None, {"syntax": "lark", "definition": 'start: "a"'})["function"]
    assert lark["parameters"]["properties"]["input"] == {"type": "string"}
    assert lark["description"].endswith('start: "a"')
    assert keeps_inputs([{"type": "function", "function": regex}], {"f"})
    assert not keeps_inputs([{"type": "function", "function": lark}], {"f"})
