"""Makes the grammar of an answer to a request with tools, if the answer must match anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.text.output import think
from router.text.output.framing import ToolUse, Unmarked
from router.text.output.grammars.calls import (
    MAX_UNMARKED_TOOLS,
    Before,
    Marks,
    ToolSchema,
    grammar_source,
    json_rule,
    tool_schemas,
    with_any_arguments,
)
from router.text.output.output_formats import TOOLS_BY_NAME
from router.text.output.parsing import Parsing
from router.text.structured.output import StructuredOutput
from router.text.structured.sources import schema_of
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

FIELD = "tools"


def answer_grammar(
    tools: Sequence[Mapping[str, Any]],
    use: ToolUse,
    parsing: Parsing,
    wanted: StructuredOutput | None,
    added_token: Callable[[str], int | None],
) -> StructuredOutput | None:
    """Returns what the answer must match. None: it may be any text.

    A tool that is not strict may have a schema that no grammar supports. Then its arguments are any object.

    `wanted`: what an answer without calls must match. `added_token` returns the token of a text that has one of its
    own. Raises UnsupportedFeature, naming the field, for what no grammar supports.
    """
    if not (wanted or _binds_calls(tools, use)):
        return None
    schemas = tool_schemas(tools, use)
    exact = _grammar_of(schemas, use, parsing, wanted, added_token)
    loose = with_any_arguments(schemas)
    if loose == schemas:
        return exact
    return dataclasses.replace(exact, otherwise=_grammar_of(loose, use, parsing, wanted, added_token))


def unmarked_calls(tools: Sequence[Mapping[str, Any]], use: ToolUse, wanted: StructuredOutput | None) -> Unmarked:
    """Returns which objects without a mark are calls: with a grammar, only those that it makes match a schema."""
    if use.must_call or wanted:
        return Unmarked.NONE
    if not _binds_calls(tools, use):
        return Unmarked.ANY
    return Unmarked.PLAIN if len(tools) <= MAX_UNMARKED_TOOLS else Unmarked.NONE


def _binds_calls(tools: Sequence[Mapping[str, Any]], use: ToolUse) -> bool:
    """Returns whether calls must match a grammar."""
    is_strict = use.keeps_arguments or any(_is_strict(tool) for tool in tools)
    return use.must_call or not use.is_parallel or is_strict


def _grammar_of(
    tools: Sequence[ToolSchema],
    use: ToolUse,
    parsing: Parsing,
    wanted: StructuredOutput | None,
    added_token: Callable[[str], int | None],
) -> StructuredOutput:
    marks = Marks(added_token)
    form = TOOLS_BY_NAME[parsing.formats.calls]
    calls = form.grammar(tools, use, marks)
    answer = None if wanted is None or use.must_call else _rule_of(wanted, is_possible=not calls.begins_as_json)
    before: Before = ("", [])
    if parsing.formats.reasoning == "think":
        before = think.grammar(is_open=parsing.is_reasoning_open, marks=marks)
    source = grammar_source(calls, use, marks, before=before, answer=answer)
    return StructuredOutput("llguidance", source.encode(), FIELD)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _rule_of(wanted: StructuredOutput, *, is_possible: bool) -> str:
    if not is_possible:
        raise UnsupportedFeature(
            f'{wanted.field}: calls of this model look like other JSON; with tools, send tool_choice "none"',
            field=wanted.field,
        )
    if wanted.kind != "json":
        raise UnsupportedFeature(
            f'{wanted.field}: with tools, an answer can be kept to a JSON schema alone, or send tool_choice "none"',
            field=wanted.field,
        )
    try:
        return json_rule(schema_of(wanted), has_whitespace=wanted.has_whitespace)
    except RecursionError as error:
        raise InvalidRequest(f"{wanted.field} is nested too deeply", field=wanted.field) from error
