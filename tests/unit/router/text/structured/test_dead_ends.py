"""A grammar that can be seen to have a dead end is refused before an answer begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.structured.compile import CompiledGrammar, Refusal, compile_output
from router.text.structured.output import StructuredOutput

BYTES = LLTokenizer("byte")
INTEGER, NULL = {"type": "integer"}, {"type": "null"}
OBJECT = {"type": "object", "additionalProperties": False}


def compiled(kind: str, body: Any) -> CompiledGrammar | Refusal:
    text = body if isinstance(body, str) else json.dumps(body)
    return compile_output(StructuredOutput(kind, text.encode(), "field"), BYTES)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"score": INTEGER}, "patternProperties": {"^score$": INTEGER}}, 'the property "score" too'),
        ({"properties": {"score": INTEGER}, "patternProperties": {"^score$": NULL}}, 'the property "score" too'),
        ({"properties": {"a": NULL, "b_1": INTEGER}, "patternProperties": {"^b_": INTEGER}}, 'the property "b_1" too'),
        ({"required": ["zz"], "patternProperties": {"^z+$": INTEGER}}, 'the property "zz" too'),
        ({"properties": {"a": NULL}, "patternProperties": {"^x$": NULL, "a": INTEGER}}, 'the property "a" too'),
        ({"properties": {"a": NULL}, "patternProperties": {"^é$|a": INTEGER}}, 'the property "a" too'),
        ({"properties": {"a": NULL}, "patternProperties": {r"^[^\s\S]$": INTEGER}}, "matches no name"),
        ({"properties": {"a": NULL}, "patternProperties": {"^b": NULL, "^[^\\x00-\\x{10ffff}]": NULL}}, "no name"),
    ],
)
def test_a_pattern_that_leaves_no_further_name_is_refused_with_its_place(schema: dict[str, Any], words: str) -> None:
    for each, place in ((schema, "#"), ({"type": "array", "items": OBJECT | schema}, "#/items")):
        refused = compiled("json", OBJECT | each if place == "#" else each)
        assert isinstance(refused, Refusal), refused
        assert refused.cause == "patternProperties"
        assert words in refused.error.message
        assert refused.error.message.endswith(f"at {place} is not supported")


SCORE = {"type": "object", "properties": {"score": INTEGER}}
PATTERN = {"type": "object", "patternProperties": {"^score$": INTEGER}, "additionalProperties": False}
NEEDS = {"type": "object", "required": ["score"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [SCORE, PATTERN]},
        {"allOf": [PATTERN, NEEDS]},
        {**SCORE, "allOf": [PATTERN]},
        {**SCORE, "$ref": "#/$defs/p", "$defs": {"p": PATTERN}},
        {**SCORE, "anyOf": [PATTERN, NULL]},
        {"allOf": [{"properties": {"a": SCORE}}, {"type": "object", "properties": {"a": PATTERN}}]},
        {"allOf": [{"type": "array", "items": SCORE}, {"items": PATTERN}]},
    ],
)
def test_a_pattern_that_meets_a_name_of_another_part_of_the_schema_is_refused(schema: dict[str, Any]) -> None:
    for is_open in (False, True):
        output = StructuredOutput("json", json.dumps(schema).encode(), "field", is_open=is_open)
        refused = compile_output(output, BYTES)
        assert isinstance(refused, Refusal), refused
        assert 'that matches the property "score" too' in refused.error.message


def test_alternatives_of_which_one_has_the_name_and_another_the_pattern_are_served() -> None:
    assert isinstance(compiled("json", {"anyOf": [SCORE, PATTERN]}), CompiledGrammar)


def test_a_schema_inside_rules_of_a_client_is_looked_at_whatever_its_lines() -> None:
    schema = json.dumps(PATTERN | SCORE, indent=1)
    refused = compiled("grammar", f'start: "x" y\ny: %json {schema}\n')
    assert isinstance(refused, Refusal)
    assert refused.cause == "patternProperties"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": NULL}, "patternProperties": {"^b": INTEGER}},
        {"properties": {"a": NULL}, "patternProperties": {"^b": False}, "additionalProperties": INTEGER},
        {"patternProperties": {"": INTEGER}},
        {"patternProperties": {"^.*$": INTEGER}, "additionalProperties": True},
    ],
)
def test_patterns_beside_other_names_are_kept_to(schema: dict[str, Any]) -> None:
    assert isinstance(compiled("json", OBJECT | schema), CompiledGrammar)


def test_the_schema_of_a_tool_is_looked_at_within_the_grammar_of_its_calls() -> None:
    schema = OBJECT | {"properties": {"n": INTEGER}, "patternProperties": {"^n$": INTEGER}}
    source = f'%llguidance {{}}\nstart: "call " arguments\narguments: %json {json.dumps(schema)}\n'
    refused = compiled("llguidance", source)
    assert isinstance(refused, Refusal)
    assert refused.cause == "patternProperties"


@pytest.mark.parametrize(
    ("kind", "body", "follows"),
    [
        ("grammar", 'start: "a" X\nX: /[a-z]+/ & /[0-9]+/', "a"),
        ("grammar", 'start: "a" ("b" | "z" X)\nX: /[a-z]/ & /[0-9]/', "az"),
        ("grammar", 'start: "k" ("b" X | "z")\nX: /[a-z]/ & /[0-9]/', "kb"),
        ("grammar", 'start: "a" (?i:"b") "c" | "a" X\nX: /x/ & /y/', None),
        ("grammar", "start: X\nX: /[a-z]+/ & /[0-9]+/", ""),
        ("regex", "a[^\\x00-\\x{10ffff}]", ""),
    ],
)
def test_rules_and_patterns_of_a_client_with_a_dead_end_are_refused(kind: str, body: str, follows: str | None) -> None:
    refused = compiled(kind, body)
    assert isinstance(refused, Refusal), refused
    if follows:
        assert refused.cause == "unsatisfiable"
        assert refused.error.message == f"field has a dead end: nothing may follow '{follows}'"
    elif follows == "":
        assert refused.error.message == "field matches no text at all"


@pytest.mark.parametrize("body", ['start: "a" ("b" | X)\nX: /[a-z]/ & /[0-9]/', 'start: "a" x\nx[stop=""]: /[b-d]*/'])
def test_rules_without_a_dead_end_are_served(body: str) -> None:
    assert isinstance(compiled("grammar", body), CompiledGrammar)


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
LISTS = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}


NESTED = {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {**LISTS, "items": {"$ref": "#/$defs/a"}}}}


@pytest.mark.parametrize("schema", [ENDLESS, LISTS, {"anyOf": [ENDLESS, LISTS]}, NESTED])
def test_a_schema_whose_values_would_never_end_is_refused(schema: dict[str, Any]) -> None:
    refused = compiled("json", schema)
    assert isinstance(refused, Refusal)
    assert refused.cause == "unsatisfiable"
    assert refused.error.message == "field matches no text of finite length"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {**ENDLESS, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {**ENDLESS, "type": ["object", "null"]},
        {"type": "object", "required": ["b"]},
    ],
)
def test_a_schema_that_refers_to_itself_and_may_end_is_served(schema: dict[str, Any]) -> None:
    assert isinstance(compiled("json", schema), CompiledGrammar)


CHAIN = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
LINK = {"$ref": "#/$defs/n"}
LOOP = {"$ref": "#/$defs/loop"}


@pytest.mark.parametrize(
    ("schema", "good", "endless"),
    [
        ({"type": "object", "properties": {"a": LINK}}, "{}", '{"a"'),
        ({"type": "object", "properties": {"a": LOOP}}, "{}", '{"a"'),
        ({"type": "object", "properties": {"a": {"allOf": [LINK]}}}, "{}", '{"a"'),
        ({"type": "object", "additionalProperties": LINK}, "{}", '{"a"'),
        ({"type": "object", "patternProperties": {"^a": LINK}, "additionalProperties": INTEGER}, '{"b":1}', '{"a"'),
        ({"type": "array", "items": LINK}, "[]", "[{"),
        ({"type": "array", "prefixItems": [INTEGER, LINK]}, "[1]", "[1,"),
        ({"anyOf": [LINK, INTEGER]}, "1", "{"),
        ({"oneOf": [LINK, INTEGER]}, "1", "{"),
    ],
)
def test_no_answer_begins_a_value_inside_that_would_never_end(schema: dict[str, Any], good: str, endless: str) -> None:
    outcome = compiled("json", schema | {"$defs": {"n": CHAIN, "loop": LOOP}})
    assert isinstance(outcome, CompiledGrammar), outcome
    for text, is_taken in ((good, True), (endless, False)):
        matcher = LLMatcher(BYTES, outcome.grammar.source)
        assert (matcher.try_consume_tokens(list(text.encode())) == len(text)) is is_taken
