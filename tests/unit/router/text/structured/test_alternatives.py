"""`oneOf` is served where no value can match two of its alternatives, however that is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.structured.alternatives import Alternatives
from router.text.structured.compile import CompiledGrammar, Refusal, compile_output
from router.text.structured.output import StructuredOutput

BYTES = LLTokenizer("byte")
TEXT = {"type": "string"}


def kind_of(name: str, /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, **properties}, "required": ["kind"]}


CAT, DOG = kind_of("cat", lives={"type": "integer"}), kind_of("dog", name=TEXT)
DEFS = {"$defs": {"cat": CAT, "dog": DOG, "kind": {"enum": ["cat", "ox"]}}}

EXCLUSIVE: list[tuple[dict[str, Any], list[Any]]] = [
    ({"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}, ["x", 1, None]),
    ({"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], **DEFS}, [{"kind": "cat"}, {"kind": "dog"}]),
    ({"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}, **DEFS},
     [[], [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "x"}]]),
    ({"oneOf": [CAT, {"type": "object", "allOf": [{"$ref": "#/$defs/dog"}]}], **DEFS}, [{"kind": "dog"}]),
    ({"oneOf": [{"const": 1}, {"const": 2}, {"enum": ["a", None]}]}, [1, 2, "a", None]),
    ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}]}, ["b", "c"]),
    ({"oneOf": [{"anyOf": [{"const": "a"}, {"type": "null"}]}, {"type": "integer"}]}, ["a", None, 3]),
    ({"oneOf": [{"type": ["string", "null"]}, {"type": ["boolean", "array"], "items": TEXT}]}, ["a", True, ["x"]]),
    ({"oneOf": [{"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]},
                {"type": "object", "properties": {"t": {"type": "array", "items": TEXT}}, "required": ["t"]}]},
     [{"t": "x"}, {"t": ["x"]}]),
    ({"oneOf": [{"type": "object", "properties": {"kind": {"$ref": "#/$defs/kind"}}, "required": ["kind"]}, DOG],
      **DEFS}, [{"kind": "ox"}, {"kind": "dog"}]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}], "oneOf": [{"const": 1}, {"const": "a"}]}, [1, "a"]),
]  # fmt: skip
OVERLAPPING: list[dict[str, Any]] = [
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b"]}]},
    {"oneOf": [{"type": "object", "properties": {"a": TEXT}}, {"type": "object", "properties": {"b": TEXT}}]},
    {"oneOf": [{"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
               {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}]},
    {"oneOf": [{"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
               {"properties": {"kind": {"const": "b"}}, "required": ["kind"]}]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}}},
               {"type": "object", "properties": {"kind": {"const": "b"}}}]},
    {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": CAT}},
    {"oneOf": [{"anyOf": [{"const": "a"}, {"type": "null"}]}, {"const": "a"}]},
    {"oneOf": [TEXT, True]},
]  # fmt: skip


def compiled(schema: Any) -> CompiledGrammar | Refusal:
    return compile_output(StructuredOutput("json", json.dumps(schema).encode(), "field"), BYTES)


@pytest.mark.parametrize(("schema", "values"), EXCLUSIVE)
def test_alternatives_that_exclude_one_another_are_served(schema: dict[str, Any], values: list[Any]) -> None:
    outcome = compiled(schema)
    assert isinstance(outcome, CompiledGrammar), outcome
    for value in values:
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
        matcher, tokens = LLMatcher(BYTES, outcome.grammar.source), list(json.dumps(value).encode())
        assert matcher.try_consume_tokens(tokens) == len(tokens), value
        assert matcher.is_accepting()


@pytest.mark.parametrize("schema", OVERLAPPING)
def test_alternatives_that_a_value_may_match_both_of_are_refused(schema: dict[str, Any]) -> None:
    refused = compiled(schema)
    assert isinstance(refused, Refusal)
    assert refused.cause == "oneOf"
    assert refused.error.message.endswith("see #")


def test_an_alternative_that_overlaps_is_named_and_one_that_does_not_is_not() -> None:
    schema = {"type": "object", "properties": {"good": EXCLUSIVE[0][0], "bad": OVERLAPPING[0]}}
    refused = compiled(schema)
    assert isinstance(refused, Refusal)
    assert refused.error.message.endswith("see #/properties/bad")


def test_many_alternatives_that_refer_to_one_another_are_compared_within_bounds() -> None:
    names = [f"d{number}" for number in range(300)]
    options = [{"$ref": f"#/$defs/{name}"} for name in names]
    schema = {"oneOf": options, "$defs": {name: {"allOf": [{"anyOf": options}]} for name in names}}
    Alternatives(schema).mark(schema)
    assert "oneOf" in schema


class CountedValues(list[Any]):
    """An `enum` that counts how often it is read."""

    times_read = 0

    def __iter__(self) -> Iterator[Any]:
        self.times_read += 1
        return super().__iter__()


class CountedPlaces(dict[str, Any]):
    """Definitions that count how often a reference leads to one."""

    times_read = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.times_read += 1
        return super().get(key, default)


def test_the_values_beside_many_alternatives_are_read_twice_at_most() -> None:
    values = CountedValues(range(10))
    schema = {"enum": values, "oneOf": [{"const": number} for number in range(10)]}
    Alternatives(schema).mark(schema)
    assert "anyOf" in schema
    assert values.times_read <= 2, "once for their texts, once for their types"


def test_a_reference_beside_many_alternatives_is_followed_once_for_each() -> None:
    places = CountedPlaces(any=True)
    schema = {"$ref": "#/$defs/any", "oneOf": [{"const": number} for number in range(30)], "$defs": places}
    Alternatives(schema).mark(schema)
    assert "anyOf" in schema
    assert places.times_read <= 30


@pytest.mark.parametrize("is_open", [False, True])
def test_a_property_that_a_discriminator_names_is_in_every_answer(is_open: bool) -> None:
    """Pydantic requires no property that has a default, which the constants of unions often have."""
    cat, dog = ({key: value for key, value in each.items() if key != "required"} for each in (CAT, DOG))
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, dog], "$defs": {"cat": cat}, "discriminator": {"propertyName": "kind"}}
    output = StructuredOutput("json", json.dumps(schema).encode(), "field", is_open=is_open)
    outcome = compile_output(output, BYTES)
    assert isinstance(outcome, CompiledGrammar), outcome
    for value, is_taken in (
        ({"kind": "cat", "lives": 9}, True),
        ({"kind": "dog"}, True),
        ({"lives": 9}, False),
        ({}, False),
    ):
        matcher, tokens = LLMatcher(BYTES, outcome.grammar.source), list(json.dumps(value).encode())
        taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert taken is is_taken, value
    assert isinstance(compiled({**schema, "discriminator": {"propertyName": "lives"}}), Refusal)
