"""Values that models write without quotes become what the schema admits, in answers and in the grammar of calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from router.text.output.framing import ToolUse
from router.text.output.output_formats import TOOLS_BY_NAME
from router.text.output.values.admitted_values import ANYTHING, Admitted, admitted_by
from router.text.output.values.json_scanner import MAX_DEPTH
from router.text.output.values.plain_value import PlainValue
from tests.conformance.reading import joined
from tests.unit.router.text.output.test_tool_grammars import grammar, permits
from twostroke.base.errors import UnsupportedFeature

STRING, NULL, INTEGER, OBJECT = ({"type": kind} for kind in ("string", "null", "integer", "object"))
OPTIONAL = (
    {"anyOf": [STRING, NULL]},
    {"anyOf": [NULL, STRING], "default": None, "title": "Note"},
    {"oneOf": [STRING, NULL]},
    {"type": ["string", "null"]},
    {"type": "string", "nullable": True},
    {"$ref": "#/$defs/Optional"},
    {"anyOf": [{"$ref": "#/$defs/Text"}, NULL]},
    {"anyOf": [{"anyOf": [STRING, {"type": "string", "format": "uri"}]}, NULL]},
    {"allOf": [{"type": ["string", "null", "integer"]}, {"type": ["null", "string"]}]},
    {"anyOf": [{"$ref": "#/definitions/Text"}, {"const": None}]},
    {"$ref": "#/properties/other"},
)
TEXT = (STRING, {"$ref": "#/$defs/Text"}, {"allOf": [{"$ref": "#/$defs/Text"}]}, {"type": ["string"]})
COLOURS = (
    {"enum": ["red", "5", "null"]},
    {"type": "string", "enum": ["red", "5", "null"]},
    {"$ref": "#/$defs/Colour"},
    {"anyOf": [{"const": "red"}, {"const": "5"}, {"const": "null"}]},
    {"oneOf": [{"enum": ["red"]}, {"type": "string", "enum": ["5", "null"]}]},
)
DEFINITIONS = {
    "$defs": {"Text": STRING, "Optional": {"anyOf": [STRING, NULL]}, "Colour": {"enum": ["red", "5", "null"]}},
    "definitions": {"Text": STRING},
}
SCALARS = ("12345", "1.5", "-0", "1e3", "true", "False", "None", "NULL", '"quoted"', "2024-01-01", " 5 ", "")
RAW = [
    *((schema, raw, raw) for schema in (*OPTIONAL, *TEXT) for raw in SCALARS),
    *((schema, raw, raw) for schema in (*OPTIONAL, *TEXT) for raw in ('{"a": 1}', "[1, 2]", "[x]", "nullable", "nul")),
    *((schema, "null", None) for schema in OPTIONAL),
    *((schema, "null", "null") for schema in TEXT),
    *((schema, raw, raw) for schema in COLOURS for raw in ("red", "5", "null")),
    ({"enum": ["a", 1, True, None]}, "a", "a"),
    ({"enum": ["a", 1, True, None]}, "1", 1),
    ({"enum": ["a", 1, True, None]}, "true", True),
    ({"enum": ["a", 1, True, None]}, "null", None),
    ({"anyOf": [STRING, {"const": 5}]}, "5", 5),
    ({"anyOf": [STRING, {"const": 5}]}, "55", "55"),
    ({"anyOf": [STRING, INTEGER]}, "5", "5"),
    ({"anyOf": [STRING, OBJECT]}, '{"a": 1}', {"a": 1}),
    ({"anyOf": [STRING, OBJECT]}, "{a}", "{a}"),
    ({"anyOf": [STRING, OBJECT]}, "[1]", "[1]"),
    ({"type": ["array", "string"]}, '["a",\n "b"]', ["a", "b"]),
    ({"type": ["array", "string"]}, "a, b", "a, b"),
    ({"anyOf": [INTEGER, NULL]}, "5", 5),
    ({"anyOf": [INTEGER, NULL]}, "null", None),
    ({"anyOf": [INTEGER, NULL]}, "None", None),
    ({"$ref": "#/$defs/Number"}, "+05", 5),
    ({"type": "number"}, ".5", 0.5),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "FALSE", False),
    (OBJECT, "{'a': True, 'b': (1, None)}", {"a": True, "b": [1, None]}),
    (OBJECT, '{"a": "x\ny"}', {"a": "x\ny"}),
    (OBJECT, json.dumps('{"a": 1}'), {"a": 1}),
    (OBJECT, "no object", "no object"),
    (INTEGER, "three", "three"),
    ({}, "5", "5"),
    ({}, '{"a": 1}', {"a": 1}),
    ({}, "null", None),
    (True, "true", "true"),
    ({"description": "A zip code."}, "02134", "02134"),
]
"""A schema, what the model writes, and the value that it is."""
SCHEMAS = [json.loads(each) for each in dict.fromkeys(json.dumps(schema) for schema, _, _ in RAW)]


def tool(schema: Any) -> dict[str, Any]:
    properties = {"value": schema, "other": {"type": ["string", "null"]}}
    definitions = {**DEFINITIONS, "$defs": {**DEFINITIONS["$defs"], "Number": {"anyOf": [INTEGER, NULL]}}}
    return {"type": "object", "properties": properties, **definitions}


def call(raw: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=value>\n{raw}\n</parameter>\n</function>\n</tool_call>"


def test_a_value_is_what_the_schema_admits() -> None:
    draw = random.Random(1)
    for schema, raw, value in RAW:
        output = call(raw)
        for cut in (0, *draw.choices(range(len(output)), k=3)):
            parser = TOOLS_BY_NAME["qwen3_coder"].parser({"f": tool(schema)}, lambda rank: f"call_{rank}")
            (said,) = joined([*parser.feed(output[:cut]), *parser.feed(output[cut:]), *parser.flush()])
            read = json.loads(said[2])
            assert read == {"value": value}, (schema, raw)
            assert type(read["value"]) is type(value), (schema, raw)


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_the_grammar_permits_texts_as_they_are(schema: Any, is_strict: bool) -> None:
    function = {"name": "f", "parameters": tool(schema), "strict": is_strict}
    tools = [{"type": "function", "function": function}]
    if is_strict and "uri" in json.dumps(schema):
        with pytest.raises(UnsupportedFeature, match="format"):
            grammar("qwen3_coder", ToolUse(must_call=True), tools=tools)
        return
    kept = grammar("qwen3_coder", ToolUse(must_call=True), tools=tools)
    for of, raw, value in RAW:
        is_text = of == schema and raw == value and raw.strip() == raw != ""
        if is_text and (of, raw) not in NOT_ADMITTED:
            assert permits(kept, call(raw)), raw


NOT_ADMITTED: list[Any] = [(OBJECT, "no object"), (INTEGER, "three")]
"""What a model may write without a grammar alone."""


def test_the_grammar_keeps_to_constants_and_to_numbers() -> None:
    for schema, good, bad in (
        (COLOURS[0], "red", "blue"),
        ({"anyOf": [{"enum": ["a b"]}, NULL]}, "a b", "ab"),
        ({"anyOf": [{"enum": ["a b"]}, NULL]}, "null", "None"),
        ({"enum": ["a", 1]}, "1", "2"),
        ({"anyOf": [INTEGER, NULL]}, "5", "five"),
    ):
        function = {"name": "f", "parameters": tool(schema), "strict": True}
        kept = grammar("qwen3_coder", ToolUse(must_call=True), tools=[{"type": "function", "function": function}])
        assert permits(kept, call(good)), good
        assert not permits(kept, call(bad)), bad


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string", "maxLength": 3}, NULL]},
        {"anyOf": [STRING, {"type": "object", "properties": {"a": INTEGER}}]},
        {"type": "string", "enum": ["a"], "minLength": 2},
    ],
)
def test_a_strict_value_whose_text_cannot_be_kept_to_the_schema_is_refused(schema: Any) -> None:
    function = {"name": "f", "parameters": tool(schema), "strict": True}
    tools = [{"type": "function", "function": function}]
    with pytest.raises(UnsupportedFeature, match="cannot be kept to in this model's format of calls"):
        grammar("qwen3_coder", ToolUse(), tools=tools)
    function["strict"] = False
    assert grammar("qwen3_coder", ToolUse(must_call=True), tools=tools) is not None


def test_an_optional_text_is_streamed_as_soon_as_it_is_not_null() -> None:
    written: list[str] = []
    value = PlainValue(admitted_by(tool(OPTIONAL[0]), "value"), written.append)
    value.add("nul")
    assert written == []
    value.add("ls")
    assert "".join(written) == '"nulls'


def test_a_long_object_is_an_object() -> None:
    long = {"a": ["x" * 100] * 400}
    parser = TOOLS_BY_NAME["qwen3_coder"].parser({"f": tool(OBJECT)}, str)
    parts = [*parser.feed(call(json.dumps(long))), *parser.flush()]
    assert json.loads("".join(part[-1] for part in parts if len(part) == 4)) == {"value": long}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_value_may_be_as_deep_as_arguments_may_be(opening: str, closing: str) -> None:
    deep = opening * (MAX_DEPTH - 1) + "1.0" + closing * (MAX_DEPTH - 1)
    for schema in ({"anyOf": [STRING, OBJECT, {"type": "array"}]}, {"enum": [1, 2]}):
        parser = TOOLS_BY_NAME["qwen3_coder"].parser({"f": tool(schema)}, str)
        parts = [*parser.feed(call(deep)), *parser.flush()]
        assert json.loads("".join(part[-1] for part in parts if len(part) == 4)) == {"value": json.loads(deep)}


def test_schemas_that_refer_to_themselves_or_are_none_admit_anything() -> None:
    loop = {"$defs": {"A": {"$ref": "#/$defs/A"}}, "properties": {"value": {"$ref": "#/$defs/A"}}}
    assert admitted_by(loop, "value") == ANYTHING
    for schema in ({"$ref": "#/nowhere"}, {"$ref": "other.json"}, {"type": 5}, {"anyOf": 5}, {"type": "str"}, 5):
        assert admitted_by({"properties": {"value": schema}}, "value") == ANYTHING
    wide = {"$defs": {str(rank): {"anyOf": [{"$ref": f"#/$defs/{rank + 1}"}] * 9} for rank in range(60)}}
    assert admitted_by({**wide, "properties": {"value": {"$ref": "#/$defs/0"}}}, "value") == ANYTHING


def test_parameters_are_found_wherever_the_schema_of_the_arguments_has_them() -> None:
    text = Admitted(frozenset({"string"}))
    inner = {"type": "object", "properties": {"value": STRING}}
    for schema in (
        inner,
        {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": inner}},
        {"allOf": [inner, {"properties": {"other": INTEGER}}]},
        {"anyOf": [inner, {"properties": {"other": INTEGER}}]},
        {"additionalProperties": STRING},
    ):
        assert admitted_by(schema, "value") == text
