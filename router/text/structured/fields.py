"""Fields with which clients ask for structured output: OpenAI's `response_format` and `text.format`, and vLLM's
`structured_outputs`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from router.json_body import checked_utf8, parse_json_text, wrong_kind
from router.text.structured.output import StructuredOutput
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

MOST_CHOICES = 20_000
"""Most strings of a choice. As many compile within a fifth of a second."""

CLOSES = "disable_additional_properties"
"""Key in `structured_outputs`. False: objects may have properties that their schema does not name or forbid."""

_ELSEWHERE: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields of older versions of vLLM and of other servers, and the key of `structured_outputs` that replaces each."""
STRUCTURED = frozenset({*_ELSEWHERE, "response_format", "structured_outputs"})
"""Fields that ask for structured output, here or at other servers."""


def structured_output(body: Mapping[str, Any]) -> StructuredOutput | None:
    """Returns what a body asks for; None: any text. Raises InvalidRequest, naming the field."""
    for other, name in _ELSEWHERE.items():
        if body.get(other) is not None:
            raise UnsupportedFeature(
                f"{other} is not supported by this server: use structured_outputs with {name}", field=other
            )
    form, wanted = body.get("response_format"), body.get("structured_outputs")
    if form is None and wanted is None:
        return None
    by_format = _by_format(form, "response_format")
    return opened(_either(by_format, _by_kind(wanted), "response_format"), wanted)


def structured_text(form: Any, body: Mapping[str, Any]) -> StructuredOutput | None:
    """Returns what a body of /v1/responses asks for; `form` is its `text.format`."""
    by_format = _by_format(form, "text.format", is_nested=False)
    output = _either(by_format, structured_output({**body, "response_format": None}), "text.format")
    return opened(output, body.get("structured_outputs"))


def _either(
    by_format: StructuredOutput | None, by_kind: StructuredOutput | None, field: str
) -> StructuredOutput | None:
    if by_format is not None and by_kind is not None:
        raise InvalidRequest(f"{field} and structured_outputs exclude each other", field="structured_outputs")
    return by_format or by_kind


def opened(output: StructuredOutput | None, wanted: Any) -> StructuredOutput | None:
    """Allows properties that a schema does not name, if the client sends false as `disable_additional_properties`.

    JSON Schema allows them where `additionalProperties` is missing.
    """
    is_closed = wanted.get(CLOSES) if isinstance(wanted, Mapping) else None
    if not isinstance(is_closed, bool | None):
        raise wrong_kind(f"structured_outputs.{CLOSES}", is_closed, "true or false")
    return output if output is None or is_closed is not False else dataclasses.replace(output, is_open=True)


def _by_format(wanted: Any, field: str, *, is_nested: bool = True) -> StructuredOutput | None:
    """Returns the output of a response format. `is_nested`: the schema is in an object of its own."""
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping):
        raise wrong_kind(field, wanted, "an object")
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return any_object(field)
        case "json_schema":
            name = f"{field}.json_schema" if is_nested else field
            return _by_schema(wanted.get("json_schema") if is_nested else wanted, name)
        case other:
            got = shown(other) if isinstance(other, str) else json.dumps(other)[:40]
            raise UnsupportedFeature(
                f"{field}.type must be text, json_object or json_schema, got {got}", field=f"{field}.type"
            )


def _by_schema(described: Any, name: str) -> StructuredOutput:
    if not isinstance(described, Mapping):
        raise wrong_kind(name, described, "an object")
    is_strict = described.get("strict")
    if not isinstance(is_strict, bool | None):
        raise wrong_kind(f"{name}.strict", is_strict, "true or false")
    return _schema(described.get("schema"), f"{name}.schema", is_strict=bool(is_strict))


def _schema(schema: Any, field: str, *, is_strict: bool = False, has_whitespace: bool = True) -> StructuredOutput:
    if isinstance(schema, str):
        text = schema_text(schema, field)
    elif isinstance(schema, Mapping):
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    else:
        raise wrong_kind(field, schema, "an object")
    return StructuredOutput("json", text.encode(), field, is_strict, has_whitespace)


def schema_text(text: str, field: str) -> str:
    """Returns a schema that came as text. Raises InvalidRequest, naming the field, if it is not a JSON object.

    It is checked here because grammars of calls, and replies, use the schema before it is compiled.
    """
    if not text:
        raise InvalidRequest(f"{field} must not be empty", field=field)
    if not isinstance(parse_json_text(text, field), Mapping):
        raise InvalidRequest(f"{field} must be a JSON object", field=field)
    return text


def any_object(field: str, *, has_whitespace: bool = True) -> StructuredOutput:
    return _schema({"type": "object"}, field, has_whitespace=has_whitespace)


def _by_kind(wanted: Any) -> StructuredOutput | None:
    field = "structured_outputs"
    if wanted is None or wanted == {}:
        return None
    if not isinstance(wanted, Mapping):
        raise wrong_kind(field, wanted, "an object")
    given = {name: value for name, value in wanted.items() if name in _KINDS and value not in (None, False)}
    if wanted.keys() == {CLOSES}:  # it belongs to the schema of another field
        return None
    if len(given) != 1:
        names = ", ".join(_KINDS)
        raise InvalidRequest(f"{field} must have one of {names}, got {', '.join(given) or 'none'}", field=field)
    for name in ("structural_tag", "whitespace_pattern"):
        if wanted.get(name):
            raise UnsupportedFeature(f"{field}.{name} is not supported by this server", field=f"{field}.{name}")
    ((name, value),) = given.items()
    return _KINDS[name](value, f"{field}.{name}", wanted.get("disable_any_whitespace") is not True)


def _json(value: Any, field: str, has_whitespace: bool) -> StructuredOutput:
    return _schema(value, field, has_whitespace=has_whitespace)


def _json_object(value: Any, field: str, has_whitespace: bool) -> StructuredOutput:
    if value is not True:
        raise wrong_kind(field, value, "true or false")
    return any_object(field, has_whitespace=has_whitespace)


def _text(kind: str) -> Callable[[Any, str, bool], StructuredOutput]:
    def read(value: Any, field: str, has_whitespace: bool) -> StructuredOutput:
        del has_whitespace
        if not isinstance(value, str):
            raise wrong_kind(field, value, "a string")
        return StructuredOutput(kind, checked_utf8(value, field).encode(), field)

    return read


def _choice(value: Any, field: str, has_whitespace: bool) -> StructuredOutput:
    del has_whitespace
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise wrong_kind(field, value, "a list of strings")
    return choice_of(value, field)


def choice_of(choices: list[str], field: str) -> StructuredOutput:
    if not 1 <= len(choices) <= MOST_CHOICES:
        raise InvalidRequest(f"{field} must have from 1 to {MOST_CHOICES} strings, got {len(choices)}", field=field)
    return StructuredOutput("choice", json.dumps(choices, ensure_ascii=False).encode(), field)


_KINDS: Mapping[str, Callable[[Any, str, bool], StructuredOutput]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("grammar"),
}
"""Names in `structured_outputs`, as in vLLM."""
