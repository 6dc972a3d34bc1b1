"""Fields for structured output: what is read, and what is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.dialects.grpc.schema import options_of
from router.text.structured.fields import structured_output, structured_text
from router.text.structured.output import StructuredOutput
from twostroke.base.errors import InvalidRequest
from twostroke.rpc.v1 import inference_pb2

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
WRITTEN = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":")).encode()
JSON_FIELD = "response_format.json_schema.schema"


def by_format(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **described}}}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": None, "guided_json": None}, None),
        ({"structured_outputs": {}}, None),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutput("json", b'{"type":"object"}', "response_format"),
        ),
        (by_format(schema=SCHEMA), StructuredOutput("json", WRITTEN, JSON_FIELD)),
        (by_format(schema=SCHEMA, strict=None), StructuredOutput("json", WRITTEN, JSON_FIELD)),
        (by_format(schema=SCHEMA, strict=True), StructuredOutput("json", WRITTEN, JSON_FIELD, is_strict=True)),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput("json", WRITTEN, "structured_outputs.json")),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutput("json", b"{}", "structured_outputs.json")),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "regex": None}},
            StructuredOutput("json", b'{"type":"object"}', "structured_outputs.json_object", has_whitespace=False),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", b"a+", "structured_outputs.regex")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            StructuredOutput("choice", b'["a", "b"]', "structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            StructuredOutput("grammar", b'root ::= "a"', "structured_outputs.grammar"),
        ),
    ],
)
def test_fields_become_a_kind_and_its_text(body, wanted):
    assert structured_output(body) == wanted


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": 5}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (by_format(), JSON_FIELD),
        (by_format(schema=[SCHEMA]), JSON_FIELD),
        (by_format(schema={"const": "x" * (1 << 20)}), JSON_FIELD),
        (by_format(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 20_001}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(body, field):
    with pytest.raises(InvalidRequest) as refused:
        structured_output(body)
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput("json", b'{"type":"object"}', "text.format")),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            StructuredOutput("json", WRITTEN, "text.format.schema", is_strict=True),
        ),
    ],
)
def test_a_format_of_responses_has_its_schema_beside_its_type(form, wanted):
    assert structured_text(form, {}) == wanted


@pytest.mark.parametrize(
    ("form", "body", "field"),
    [
        ({}, {}, "text.format.type"),
        ({"type": "xml"}, {}, "text.format.type"),
        ({"type": "json_schema"}, {}, "text.format.schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, {}, "text.format.schema"),
        ({"type": "json_object"}, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"type": "text"}, {"guided_json": {}}, "guided_json"),
    ],
)
def test_a_format_of_responses_that_cannot_be_read_is_refused_by_its_name(form, body, field):
    with pytest.raises(InvalidRequest) as refused:
        structured_text(form, body)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("removed", "name"),
    [("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar"),
     ("ebnf", "grammar")],
)  # fmt: skip
def test_fields_of_other_servers_say_what_to_use_instead(removed, name):
    with pytest.raises(InvalidRequest, match=f"{removed} is not supported .* use structured_outputs with {name}"):
        structured_output({removed: "x"})


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"json_schema": "{}", "strict": True}, StructuredOutput("json", b"{}", "structured_output.json_schema", True)),
        (
            {"json_object": True, "no_whitespace": True},
            StructuredOutput("json", b'{"type":"object"}', "structured_output.json_object", has_whitespace=False),
        ),
        ({"json_object": False}, None),
        ({"regex": "a"}, StructuredOutput("regex", b"a", "structured_output.regex")),
        (
            {"choice": inference_pb2.Choices(strings=["a", "b"])},
            StructuredOutput("choice", b'["a", "b"]', "structured_output.choice"),
        ),
        ({"grammar": 'start: "a"'}, StructuredOutput("grammar", b'start: "a"', "structured_output.grammar")),
    ],
)
def test_the_grpc_api_has_the_same_kinds(message, wanted):
    request = inference_pb2.GenerateRequest(structured_output=inference_pb2.StructuredOutput(**message))
    assert options_of(request).structured == wanted


def test_a_message_without_a_kind_is_refused():
    request = inference_pb2.GenerateRequest(structured_output=inference_pb2.StructuredOutput(strict=True))
    with pytest.raises(InvalidRequest, match="must have one of json_schema"):
        options_of(request)


@pytest.mark.parametrize("written", ["", "{", "5", "null", "[]", '"x"', '{"const": NaN}', '{"title": "\\ud800"}'])
def test_a_schema_as_text_that_is_no_json_object_is_refused_where_it_is_read(written: str) -> None:
    message = inference_pb2.GenerateRequest(structured_output={"json_schema": written})
    form = {"type": "json_schema", "name": "n", "schema": written}
    for read, field in (
        (lambda: structured_output(by_format(schema=written)), JSON_FIELD),
        (lambda: structured_output({"structured_outputs": {"json": written}}), "structured_outputs.json"),
        (lambda: structured_text(form, {}), "text.format.schema"),
        (lambda: options_of(message), "structured_output.json_schema"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            read()
        assert (refused.value.field or "").startswith(field)
