"""Numbers of JSON end: digits are bounded, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.grammar.grammars import byte_compiler, lark, regex, schema, text_state
from twostroke.base.token_mask import permitted
from twostroke.grammar.vocabulary import MOST_DIGITS, digits_of
from twostroke.request import Grammar


def run_of(grammar: Grammar, before: str, digit: str = "0") -> int:
    """Returns how often a digit may come behind a text, up to 200 times."""
    state = byte_compiler().state(grammar, list(before.encode()))
    for count in range(200):
        if ord(digit) not in permitted(state.mask, 258).tolist():
            return count
        state.consume(ord(digit))
    return 200


@pytest.mark.parametrize(
    ("content", "before"),
    [
        ({"type": "number"}, "2."),
        ({"type": "number"}, "2"),
        ({"type": "number"}, "-7.5e"),
        ({"type": "number", "minimum": 0}, "2."),
        ({"type": "number", "minimum": 0, "maximum": 10}, "2."),
        ({"type": "integer"}, "1"),
        ({"type": ["number", "string"]}, "2."),
        ({}, "[2."),
        ({"type": "object"}, '{"a":2.'),
        ({"type": "array", "items": {"type": "number"}}, "[2.0,3.1"),
    ],
)
def test_a_number_has_no_more_digits_in_a_row_than_it_may(content: dict[str, Any], before: str) -> None:
    for digit in "09":
        written = len(before) - len(before.rstrip("0123456789"))
        assert run_of(schema(content), before, digit) == MOST_DIGITS - written


def test_a_number_that_cannot_end_yet_has_a_digit_with_which_it_may() -> None:
    fives = schema({"type": "integer", "multipleOf": 5})
    assert run_of(fives, "1", "9") == run_of(fives, "1", "0") == MOST_DIGITS - 1
    state = byte_compiler().state(fives, list(b"1" + b"9" * (MOST_DIGITS - 1)))
    assert permitted(state.mask, 258).tolist() == list(b"05")
    assert run_of(schema({"type": "integer", "multipleOf": 500}), "1", "9") == 200, "no one digit ends it"


@pytest.mark.parametrize(
    ("content", "before"),
    [
        ({"type": "number", "exclusiveMinimum": 0}, "0."),
        ({"type": "number", "maximum": 5}, "-0."),
        ({"type": "number", "exclusiveMinimum": 0.1}, "0.1"),
    ],
)
def test_a_number_that_must_not_be_zero_has_no_more_zeros_than_it_may(content: dict[str, Any], before: str) -> None:
    left = MOST_DIGITS - before.endswith("1")
    assert run_of(schema(content), before) == left
    state = byte_compiler().state(schema(content), list((before + "0" * left).encode()))
    assert permitted(state.mask, 258).tolist() == list(b"123456789")


def test_zeros_that_are_no_number_are_not_bounded() -> None:
    assert run_of(schema({"type": "string", "pattern": "^0{150}$"}), '"') == 150
    assert run_of(schema({"type": "string"}), '"') == 200


def test_a_number_of_a_schema_within_a_larger_grammar_ends_too() -> None:
    assert run_of(lark('start: "call: " %json {"type": "number"}'), "call: 2.") == MOST_DIGITS


@pytest.mark.parametrize(
    ("grammar", "before"),
    [
        (schema({"type": "string"}), '"'),
        (schema({"type": "object"}), '{"a":"'),
        (regex("[0-9]+x?"), ""),
        (lark("start: /[0-9]+/"), ""),
        (schema({"type": "string", "pattern": "^[0-9]{150}$"}), '"'),
        (schema({"type": "string", "pattern": "^[0-9a-f]*$"}), '"'),
    ],
)
def test_digits_that_are_no_number_are_not_bounded(grammar: Grammar, before: str) -> None:
    assert run_of(grammar, before) >= 150


@pytest.mark.parametrize("written", [0, 1, MOST_DIGITS - 1])
def test_what_is_bounded_depends_on_the_text_alone(written: int) -> None:
    text = "2." + "0" * MOST_DIGITS
    replayed = text_state(schema({"type": "number"}), text)
    state = text_state(schema({"type": "number"}), "2." + "0" * written)
    along = state.masks_along([48] * (MOST_DIGITS - written))
    assert ord("0") in permitted(along[-2], 258).tolist()
    for mask in (replayed.mask, along[-1]):
        assert ord("0") not in permitted(mask, 258).tolist()
        assert ord("e") in permitted(mask, 258).tolist()


def test_a_run_of_digits_is_counted_over_tokens() -> None:
    digits = digits_of([b"a", b"12", b"3,", b",45", b"", b"x"], 8)
    assert [digits.run_after(7, token) for token in range(8)] == [0, 9, 0, 2, 0, 0, 0, 0]
