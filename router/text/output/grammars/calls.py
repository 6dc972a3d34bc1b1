"""Grammars for answers that call tools, in llguidance's form of Lark.

Each format's file says how one call is written; this module says what may stand before and between calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.json_body import wrong_kind
from router.text.output.framing import ToolUse
from router.text.output.values.json_scanner import quoted
from router.text.structured.json_schema import UnsupportedSchema, checked_schema
from router.text.structured.sources import json_options
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest

Json = Mapping[str, Any]

MAX_UNMARKED_TOOLS = 32
"""Most tools whose calls a grammar also finds without a mark: each tool costs time for every token."""

ANY_ARGUMENTS: Json = {"type": "object"}
NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Marks:
    """Writes marks as terms of a grammar.

    A mark with a token of its own may be spelled in ordinary tokens, too. A model that never learned the token spells
    it, and parsers see only text: a spelled call has to match the same grammar.
    """

    added_token: Callable[[str], int | None]
    """Returns the token of a text that has one of its own."""

    def is_token(self, text: str) -> bool:
        return self.added_token(text) is not None

    def term(self, text: str) -> str:
        token = self.added_token(text)
        return quoted(text) if token is None else f"(<[{token}]> | {quoted(text)})"

    def after_text(self, text: str) -> str:
        """Returns the expression of any text that ends with the mark. It needs the rules `TEXT` and `lazy_rule`."""
        token = self.added_token(text)
        return _lazy_name(text) if token is None else f"({_lazy_name(text)} | TEXT <[{token}]>)"

    @staticmethod
    def lazy_rule(text: str) -> str:
        """Returns the rule of text that ends with the first spelled mark."""
        return f"{_lazy_name(text)}[lazy]: TEXT {quoted(text)}"


def _lazy_name(text: str) -> str:
    return "up_to_" + "".join(char if char.isascii() and char.isalnum() else "_" for char in text).lower()


@dataclass(frozen=True, slots=True)
class ToolSchema:
    name: str
    parameters: Json
    """Schema of the arguments, an object."""
    is_strict: bool
    field: str
    """The client's field, for errors."""

    @property
    def properties(self) -> Json | None:
        """Schemas of parameters by name. None: any parameters are allowed."""
        properties = self.parameters.get("properties")
        return (
            None
            if properties is None and self.parameters.get("additionalProperties") is not False
            else properties or {}
        )


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls, as expressions of rules."""

    trigger: str
    """The mark that begins a call in the middle of text. Empty: an answer is calls from its beginning, or text."""
    call: str
    """What follows the trigger."""
    separator: str | None
    """What stands between two calls. None: `call` is all calls of an answer already."""
    rules: tuple[str, ...]
    text: str | None = None
    """Regex of an answer without a call, where there is no trigger. None: `call` has such answers."""
    ending: str = ""
    """What may follow the last call, if the answer must call: some models only end their answer after it."""
    unmarked: tuple[str, ...] = ()
    """Rules of `in_text_unmarked`: text that ends with a call without a mark, for answers of text and calls."""
    begins_as_json: bool = False
    """Whether a call looks like any other object of JSON at its beginning."""


Before = tuple[str, list[str]]
"""An expression, and its rules."""

MakeGrammar = Callable[[Sequence[ToolSchema], ToolUse, Marks], CallGrammar]


def with_any_arguments(tools: Sequence[ToolSchema]) -> tuple[ToolSchema, ...]:
    """Returns the tools with any object as arguments, but for those that are strict."""
    return tuple(tool if tool.is_strict else replace(tool, parameters=ANY_ARGUMENTS) for tool in tools)


def tool_schemas(tools: Sequence[Json], use: ToolUse) -> tuple[ToolSchema, ...]:
    """Returns the tools that may be called. Raises UnsupportedFeature for a strict tool with an unsupported schema."""
    return tuple(
        _tool_schema(tool["function"], f"tools[{index}].function")
        for index, tool in enumerate(tools)
        if use.only in (None, tool["function"]["name"])
    )


def _tool_schema(function: Json, field: str) -> ToolSchema:
    """Returns the schema of a tool's arguments. A tool that is not strict keeps its schema where a grammar supports it.
    Otherwise its arguments are any object.
    """
    name, schema, is_strict = function["name"], function.get("parameters"), function.get("strict") is True
    field = f"{field}.parameters"
    if schema is None:
        return ToolSchema(name, NO_ARGUMENTS, is_strict, field)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequest(f"{field} must be the schema of an object", field=field)
    for keyword, kind, kind_name in (("properties", dict, "an object"), ("required", list, "a list")):
        if not isinstance(schema.get(keyword), kind | None):
            raise wrong_kind(f"{field}.{keyword}", schema[keyword], kind_name)
    try:
        copied = json.loads(json.dumps({**schema, "type": "object"}))  # checking changes it
        checked: Json = checked_schema(copied, field, is_strict=is_strict)
    except UnsupportedSchema:
        if is_strict:
            raise
        checked = ANY_ARGUMENTS
    return ToolSchema(name, checked, is_strict, field)


def grammar_source(
    calls: CallGrammar, use: ToolUse, marks: Marks, *, before: Before = ("", []), answer: str | None = None
) -> str:
    """Returns the grammar of an answer.

    `before`: what comes first, such as reasoning. `answer`: the expression of an answer that calls nothing.
    """
    trigger = marks.term(calls.trigger) if calls.trigger else ""
    call = f"{trigger} {calls.call}"
    many = call if calls.separator is None or not use.is_parallel else f"{call} ({calls.separator} {call})*"
    first, further = before
    rules = [*calls.rules, *further, rf"TEXT: /{ANY}/"]
    if use.must_call:
        start = f"{many} {calls.ending}"
    elif answer is not None:
        start = f"({many} | answer)"
        rules.append(f"answer: {answer}")
    elif not calls.trigger and calls.text is None:
        start = many
    elif not calls.trigger:
        start = f"({many} | PLAIN)"
        rules.append(f"PLAIN: /{calls.text}/")
    else:
        start = "in_text* TEXT" if use.is_parallel else "(in_text | TEXT)"
        in_text = f"{marks.after_text(calls.trigger)} {calls.call}{' | in_text_unmarked' * bool(calls.unmarked)}"
        rules += [f"in_text: {in_text}", marks.lazy_rule(calls.trigger), *calls.unmarked]
    return "\n".join(["%llguidance {}", f"start: {first} {start}", *rules, ""])


ANY = r"(.|\n)*"


def json_rule(schema: Json, *, has_whitespace: bool = True) -> str:
    options = json_options(has_whitespace=has_whitespace)
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def alternatives(name: str, calls: Sequence[str]) -> str:
    """Returns a rule that matches any one of some expressions."""
    return f"{name}: {' | '.join(f'({call})' for call in calls)}"


def object_rules(tools: Sequence[ToolSchema], arguments: str) -> tuple[str, ...]:
    """Returns the rules of `call_object`: an object with the name, and with the arguments under the key `arguments`."""
    calls = [f'{quoted(_head(tool.name, arguments))} arguments_{index} "}}"' for index, tool in enumerate(tools)]
    return (alternatives("call_object", calls), *arguments_rules(tools))


def arguments_rules(tools: Sequence[ToolSchema]) -> tuple[str, ...]:
    return tuple(f"arguments_{index}: {json_rule(tool.parameters)}" for index, tool in enumerate(tools))


def _head(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{arguments}": '


def refuse_strict(tools: Sequence[ToolSchema], form: str) -> None:
    """Refuses strict tools of a format whose arguments no schema describes."""
    for tool in tools:
        if tool.is_strict:
            named = tool.field.rpartition(".")[0]
            raise UnsupportedSchema(
                f"{named}.strict: calls in the format {shown(form)} cannot be kept to a schema", field=f"{named}.strict"
            )
