"""What compiles keeps to all that was asked for; the rest is refused in one line, with its place and its cause."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.structured.compile import CompiledGrammar, Refusal, compile_output
from router.text.structured.json_schema import UnsupportedSchema, checked_schema, schemas_in
from router.text.structured.output import StructuredOutput

BYTES = LLTokenizer("byte")


def compiled(
    kind: str, body: Any, *, is_strict: bool = False, has_whitespace: bool = True
) -> CompiledGrammar | Refusal:
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    return compile_output(StructuredOutput(kind, text.encode(), "field", is_strict, has_whitespace), BYTES)


def takes(kind: str, body: Any, text: str, **options: bool) -> bool:
    outcome = compiled(kind, body, **options)
    assert isinstance(outcome, CompiledGrammar), outcome
    matcher = LLMatcher(BYTES, outcome.grammar.source)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "body", "good", "bad"),
    [
        ("json", {"type": "object"}, '{ "a": [1, null] }', "[1]"),
        ("json", {"enum": ["é", 5]}, '"é"', '"e"'),
        ("json", {"type": "integer", "format": "int32"}, "7", "7.5"),
        ("json", {"type": "string", "format": "date"}, '"2026-11-26"', '"26.11."'),
        ("json", {"type": "array", "uniqueItems": False, "maxItems": 1}, "[1]", "[1,1]"),
        ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}, "unused": {"not": {}}}}, "null", "1"),
        ("json", {"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ("regex", r"\d{2}|x/y", "x/y", "1"),
        ("choice", ["a|b", "", 'q"\n\\'], 'q"\n\\', "a"),
        ("choice", ["a|b", "", "é"], "", "b"),
        ("grammar", 'start: "a" start | "b"', "aab", "aa"),
        ("grammar", 'root ::= [a-c]+ "x"', "abcx", "abc"),
    ],
)
def test_each_kind_takes_what_it_describes_and_nothing_else(kind, body, good, bad):
    assert takes(kind, body, good)
    assert not takes(kind, body, bad)


def test_json_without_whitespace_has_none():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert takes("json", schema, '{ "a": 1}')
    assert not takes("json", schema, '{ "a": 1}', has_whitespace=False)
    assert takes("json", schema, '{"a":1}', has_whitespace=False)


@pytest.mark.parametrize("layout", [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}])
def test_json_may_be_laid_out_as_it_is_printed(layout):
    value = {"a": [1, {"b": [{"c": {}}, []]}], "d": "x"}
    text = json.dumps(value, **layout)
    assert takes("json", {"type": "object"}, text)
    assert takes("json", {"type": "object"}, text.replace("\n", "\r\n"))


@pytest.mark.parametrize("padding", ["\n\n", "  ", " \n", "\n" + " " * 33, "\n\t\n"])
def test_json_is_not_padded_with_whitespace(padding):
    for text in ('{@"a":1}', '{"a":@1}', '{"a":1@}', '{"a":1@,"b":2}', '{"a":[1,@2]}'):
        assert takes("json", {"type": "object"}, text.replace("@", " "))
        assert not takes("json", {"type": "object"}, text.replace("@", padding))


def test_the_name_of_a_property_is_spelt_in_one_way_only():
    """With an escape a free property could stand for a declared one, with a value that the schema forbids."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert takes("json", schema, '{"a":"x","b":1}')
    assert not takes("json", schema, '{"\\u0061":1}')
    assert not takes("json", schema, '{"a":1}')


UNSUPPORTED: list[tuple[str, Any]] = [
    ("not", {"not": {"type": "string"}}),
    ("then", {"if": {"type": "string"}, "then": {"maxLength": 1}}),
    ("contains", {"type": "array", "contains": {"type": "string"}}),
    ("minContains", {"type": "array", "contains": {}, "minContains": 2}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": {"type": "null"}}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("$dynamicRef", {"$dynamicRef": "#x"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("divisibleBy", {"type": "integer", "divisibleBy": 2}),
    ("x-guidance", {"x-guidance": {"lenient": True}}),
]
CONTROLS: list[tuple[str, Any]] = [
    ("const", {"const": "a\x00b"}),
    ("const", {"const": {"k": ["\x02z"]}}),
    ("const", {"const": "a\x7fb"}),
    ("enum", {"enum": ["x", "x\x01y"]}),
    ("pattern", {"pattern": "^a\x01b$"}),
    ("pattern", {"pattern": r"^a\x01b$"}),
    ("pattern", {"pattern": r"^a\x{1}b$"}),
    ("pattern", {"pattern": r"^a\u001Fb$"}),
    ("pattern", {"pattern": r"^a\x7fb$"}),
    ("patternProperties", {"type": "object", "patternProperties": {r"^\x1b$": {"type": "null"}}}),
]


@pytest.mark.parametrize(("keyword", "schema"), UNSUPPORTED, ids=[keyword for keyword, _ in UNSUPPORTED])
def test_an_unsupported_keyword_is_refused_by_name_with_its_place(keyword, schema):
    nested = {"type": "object", "properties": {"a/b": {"anyOf": [True, {"$ref": "#/$defs/c"}]}}, "$defs": {"c": schema}}
    for each, place in ((schema, "#"), (nested, "#/$defs/c")):
        refused = compiled("json", each)
        assert isinstance(refused, Refusal)
        assert refused.cause in UNSUPPORTED_TOGETHER.get(keyword, {keyword})
        assert f'field: "{refused.cause}"' in refused.error.message
        assert refused.error.message.endswith(f"at {place} is not supported")
        assert refused.error.field == "field"


@pytest.mark.parametrize(("keyword", "schema"), CONTROLS)
def test_texts_with_characters_that_strings_cannot_have_are_refused_by_name(keyword, schema):
    refused = compiled("json", schema)
    assert isinstance(refused, Refusal)
    assert refused.cause == keyword
    assert f'"{keyword}" with control characters at #' in refused.error.message


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^a\nb\tc$", r"a\nb\tc"),
        (r"^[^\x00-\x1f]+$", "ab"),
        (r"^[\x20-\x7e]+$", "ab"),
        (r"^\x41\u0042$", "AB"),
        (r"^[\]\x01a]$", "a"),
    ],
)
def test_patterns_that_name_other_characters_beside_controls_are_kept_to(pattern, text):
    assert takes("json", {"type": "string", "pattern": pattern}, f'"{text}"')


UNSUPPORTED_TOGETHER = {"then": {"if", "then"}, "minContains": {"contains", "minContains"}}
"""Keywords that only come in pairs, of which either may be named."""


@pytest.mark.parametrize(
    ("kind", "body", "cause", "words"),
    [
        ("json", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "can match two of its .* see #$"),
        ("json", {"type": "string", "pattern": "(?=a)b"}, "pattern", "look-around"),
        ("json", {"type": "string", "pattern": r"(a)\1"}, "pattern", "backreferences are not supported"),
        ("json", {"$ref": "http://example.org/x"}, "$ref", "not present"),
        ("json", {"$ref": "#"}, "unsatisfiable", "matches no text"),
        ("json", {"type": "float"}, "syntax", "Invalid type: float"),
        ("json", "[" * 90_000, "size", "nested too deeply"),
        ("json", {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]},
         "size", "schema too large"),
        ("regex", "(a", "pattern", "unclosed group"),
        ("regex", "", "syntax", "must not be empty"),
        ("grammar", "start: other", "syntax", "unknown name"),
        ("grammar", "root ::= (", "syntax", r"Expected '\)'"),
        ("grammar", "start: a\na: a", "unsatisfiable", "matches no text"),
        ("grammar", "root ::= " + "(" * 5000, "size", "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_refused_has_one_line_and_a_cause(kind, body, cause, words):
    refused = compiled(kind, body)
    assert isinstance(refused, Refusal)
    assert refused.cause == cause
    assert "\n" not in refused.error.message
    assert len(refused.error.message) < 1000
    with pytest.raises(type(refused.error), match=words):
        raise refused.error


def test_formats_that_cannot_be_kept_to_are_notes_unless_strict():
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "iri"}}, "required": ["a"]}
    assert takes("json", schema, '{"a":"anything"}')
    refused = compiled("json", schema, is_strict=True)
    assert isinstance(refused, Refusal)
    assert refused.error.message == 'field: "format" "iri" at #/properties/a is not supported'


LONG: dict[str, Callable[[int], dict[str, Any]]] = {
    "brackets": lambda length: {"pattern": "[" * length},
    "brackets and a backslash": lambda length: {"pattern": "[" * length + "\\"},
    "references by name": lambda length: {
        "properties": {str(rank): {"$ref": "a"} for rank in range(length // 10)},
        "$defs": {f"d{rank}": {} for rank in range(length // 10)},
    },
}


@pytest.mark.parametrize("kind", LONG)
def test_checking_a_schema_takes_no_longer_than_its_length_says(kind: str) -> None:
    """The event loop does it for short requests, and one process for all others."""

    def seconds(length: int) -> float:
        schema = LONG[kind](length)
        began_s = time.process_time()
        checked_schema(schema, "field", is_strict=True)
        return time.process_time() - began_s

    assert min(seconds(40_000) for _ in range(3)) < 40 * min(seconds(4_000) for _ in range(3)), "ten times as long"


def test_places_of_schemas_take_little_memory_below_a_long_name() -> None:
    schema = {"properties": {"x" * 40_000: {"anyOf": [{} for _ in range(2_000)]}}}
    tracemalloc.start()
    try:
        places = [place for place, _ in schemas_in(schema)]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(places) == 2_002
    assert peak_bytes < 2_000 * 1_000, "each place written at once takes 40 times as much"
    assert str(places[-1]) == f"#/properties/{'x' * 40_000}/anyOf/1999"


def test_what_is_referred_to_by_name_is_checked_wherever_it_is_defined() -> None:
    schema = {"anyOf": [{"$ref": "a"}, {"$ref": "b"}], "definitions": {"b": {"not": {}}}}
    with pytest.raises(UnsupportedSchema, match=r'"not" at #/definitions/b'):
        checked_schema(schema, "field", is_strict=False)


@pytest.mark.parametrize("place", ["0", "+0", "000"])
def test_a_place_in_a_list_is_checked_however_it_is_written(place: str) -> None:
    with pytest.raises(UnsupportedSchema, match='"not" at #/others/'):
        checked_schema({"$ref": f"#/others/{place}", "others": [{"not": {}}]}, "field", is_strict=False)


@pytest.mark.parametrize("place", ["1" * 5000, "0" * 5000 + "7", "\u0661"])
def test_a_reference_to_a_place_that_no_list_has_is_refused(place: str) -> None:
    schema = {"anyOf": [{"type": "null"}, {"$ref": f"#/anyOf/{place}"}]}
    assert checked_schema(schema, "field", is_strict=False) is schema
    assert isinstance(compiled("json", schema), Refusal)
