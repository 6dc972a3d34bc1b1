"""What a schema leaves out is forbidden where it names properties, unless a client asks for the letter."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.structured.compile import CompiledGrammar, Refusal, compile_output
from router.text.structured.fields import structured_output, structured_text
from router.text.structured.json_schema import UnsupportedSchema, checked_schema
from router.text.structured.output import StructuredOutput

BYTES = LLTokenizer("byte")
INTEGER = {"type": "integer"}
A, B, C = ({"type": "object", "properties": {name: INTEGER}, "required": [name]} for name in "abc")


def takes(schema: Any, value: Any, *, is_open: bool = False) -> bool:
    output = StructuredOutput("json", json.dumps(schema).encode(), "field", is_open=is_open)
    outcome = compile_output(output, BYTES)
    assert isinstance(outcome, CompiledGrammar), outcome
    tokens = list(json.dumps(value).encode())
    matcher = LLMatcher(BYTES, outcome.grammar.source)
    is_taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    assert not is_taken or jsonschema.Draft202012Validator(schema).is_valid(value), "it violates its schema"
    return is_taken


ONE, TWO, ALL = {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("schema", "good", "wandering"),
    [
        (A, ONE, TWO),
        ({"properties": {"a": INTEGER}}, ONE, TWO),
        ({"type": "object", "properties": {}}, {}, ONE),
        ({"type": "array", "items": A}, [ONE], [TWO]),
        ({"type": "object", "properties": {"a": B}}, {"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, ONE, TWO),
        ({"allOf": [A, B]}, TWO, ALL),
        ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}}, TWO, ALL),
        ({**B, "allOf": [A]}, {"b": 2, "a": 1}, {"b": 2, "a": 1, "c": 3}),
        ({**A, "$ref": "#/$defs/b", "$defs": {"b": B}}, TWO, ALL),
        ({**A, "anyOf": [B, C]}, TWO, {"a": 1, "b": 2, "d": 3}),
        ({"anyOf": [A, B]}, ONE, TWO),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": A}}, ONE, TWO),
        ({**A, "required": ["a", "b"]}, TWO, ALL),
        ({**A, "patternProperties": {"^b$": INTEGER}}, TWO, ALL),
        ({"type": "object", "patternProperties": {"^b$": INTEGER}}, {"b": 2}, TWO),
        ({"type": "array", "prefixItems": [INTEGER]}, [1], [1, 2]),
        ({"type": "object", "properties": {"a": {"type": "array", "prefixItems": [A, B]}}},
         {"a": [ONE, {"b": 1}]}, {"a": [ONE, {"b": 1}, 3]}),
    ],
)  # fmt: skip
def test_nothing_comes_that_no_part_of_a_schema_names_but_by_the_letter(schema, good, wandering):
    assert takes(schema, good)
    assert takes(schema, good, is_open=True)
    assert not takes(schema, wandering)
    assert takes(schema, wandering, is_open=True)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, ALL),
        ({}, ALL),
        ({**A, "additionalProperties": True}, ALL),
        ({**A, "additionalProperties": INTEGER}, ALL),
        ({**A, "unevaluatedProperties": True}, ALL),
        ({"allOf": [{**A, "additionalProperties": True}, B]}, ALL),
        ({"allOf": [{**A, "patternProperties": {"^c": INTEGER}}, B]}, ALL),
        ({"type": "array"}, [1, "x"]),
        ({"type": "array", "prefixItems": [INTEGER], "items": True}, [1, "x"]),
        ({"type": "array", "prefixItems": [INTEGER], "minItems": 2}, [1, "x"]),
        ({"properties": {"a": INTEGER}, "enum": [TWO]}, TWO),
        ({**A, "const": TWO}, TWO),
        ({**A, "minProperties": 2}, TWO),
        ({"type": "object", "patternProperties": {"^x": False}}, ONE),
        ({**A, "$ref": "#named", "$defs": {"b": {"$anchor": "named", **B}}}, TWO),
    ],
)
def test_what_a_schema_says_itself_is_kept_to(schema: Any, value: Any) -> None:
    assert takes(schema, value)


def test_a_schema_that_others_extend_stays_open_to_what_they_name() -> None:
    base = {"type": "object", "properties": {"id": INTEGER}}
    schema = {"type": "array", "items": {"allOf": [{"$ref": "#/$defs/base"}, A]}, "$defs": {"base": base}}
    assert takes(schema, [{"id": 1, "a": 2}])
    assert not takes(schema, [{"id": 1, "a": 2, "b": 3}])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, ONE, TWO),
        ({"allOf": [A, B]}, TWO, ALL),
        ({**C, "$ref": "#/$defs/a", "$defs": {"a": {**A, "allOf": [B]}}}, {"c": 1, "a": 2, "b": 3}, {**ALL, "d": 4}),
    ],
)
def test_unevaluated_properties_are_forbidden_where_each_part_must_match(schema: Any, good: Any, bad: Any) -> None:
    for is_open in (False, True):
        assert takes({**schema, "unevaluatedProperties": False}, good, is_open=is_open)
        assert not takes({**schema, "unevaluatedProperties": False}, bad, is_open=is_open)


@pytest.mark.parametrize(
    "schema",
    [{"anyOf": [A, B]}, {"allOf": [{"anyOf": [A, B]}]}, {"allOf": [{**A, "patternProperties": {"^x": INTEGER}}, B]}],
)
def test_unevaluated_properties_beside_alternatives_are_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedSchema, match='"unevaluatedProperties" at # is not supported'):
        checked_schema({**schema, "unevaluatedProperties": False}, "field", is_strict=False)


def test_properties_come_in_the_order_of_the_schema_when_it_is_closed() -> None:
    assert takes({"type": "object", "properties": {"z": INTEGER, "a": INTEGER}, "required": ["a"]}, {"z": 1, "a": 2})


@pytest.mark.parametrize("kind", ["chain", "wide", "shared"])
def test_closing_takes_no_longer_than_a_schema_is_long(kind: str) -> None:
    many = 3000
    schema: dict[str, Any] = {"properties": {"a": {}}}
    if kind == "chain":
        for _ in range(300):
            schema = {"properties": {"a": {}}, "allOf": [schema]}
    elif kind == "wide":
        schema = {"allOf": [{"properties": {f"p{number}": {}}} for number in range(many)]}
    else:
        schema = {"allOf": [{"$ref": "#/$defs/a", "properties": {}} for _ in range(many)]}
        schema["$defs"] = {"a": {"allOf": [{"properties": {"x": {}}} for _ in range(many)]}}
    checked_schema(schema, "field", is_strict=False)


@pytest.mark.parametrize("said", [None, True, False])
def test_a_client_switches_to_the_letter_of_json_schema_in_any_form(said: bool | None) -> None:
    options = {"disable_additional_properties": said}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": A}}
    outputs = [
        structured_output({"structured_outputs": {"json": A, **options}}),
        structured_output({"response_format": form, "structured_outputs": options}),
        structured_text({"type": "json_schema", "name": "n", "schema": A}, {"structured_outputs": options}),
    ]
    assert [output and output.is_open for output in outputs] == 3 * [said is False]
    assert outputs[0] is not None
    assert (outputs[0].digest == StructuredOutput("json", outputs[0].body, outputs[0].field).digest) is (
        said is not False
    )


def test_properties_that_are_none_are_named_where_nothing_may_be_unevaluated() -> None:
    schema = {"unevaluatedProperties": False, "properties": []}
    refused = compile_output(StructuredOutput("json", json.dumps(schema).encode(), "field"), BYTES)
    assert isinstance(refused, Refusal)
    assert "properties" in refused.error.message


@pytest.mark.parametrize("option", [True, False, None, 5, "string", []])
def test_an_alternative_that_is_no_object_is_looked_at_as_well(option: Any) -> None:
    """`compile_output` never raises, whatever a client has written."""
    text = json.dumps({"oneOf": [A, option]}).encode()
    outcome = compile_output(StructuredOutput("json", text, "field"), BYTES)
    assert isinstance(outcome, CompiledGrammar) is (option is False)
