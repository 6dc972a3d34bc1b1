"""The grammar of an answer to a request with tools, where there is anything to keep it to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.frontend.output import think, tool_formats
from router.frontend.output.marks import Marks
from router.frontend.output.parsing import Parsing
from router.frontend.output.tool_grammar import Before, ToolSchema, grammar_source, tool_schemas, with_any_arguments
from router.frontend.output.tool_use import ToolUse
from router.frontend.structured.json_schema import checked_schema
from router.frontend.structured.output import StructuredOutput
from twostroke.errors import UnsupportedFeature

FIELD = "tools"


def answer_grammar(
    tools: Sequence[Mapping[str, Any]],
    use: ToolUse,
    parsing: Parsing,
    wanted: StructuredOutput | None,
    added_token: Callable[[str], int | None],
) -> StructuredOutput | None:
    """Returns what the answer must match. None: it may be any text.

    Where the schemas of tools that are not strict cannot be kept to, their arguments are any object.

    `wanted`: what an answer without calls must match. `added_token` returns the token of a text that has one of its
    own. Raises UnsupportedFeature, naming the field, for what no grammar keeps to.
    """
    if not (use.must_call or wanted or not use.is_parallel or any(_is_strict(tool) for tool in tools)):
        return None
    schemas = tool_schemas(tools, use)
    exact = _grammar_of(schemas, use, parsing, wanted, added_token)
    loose = with_any_arguments(schemas)
    if loose == schemas:
        return exact
    return dataclasses.replace(exact, otherwise=_grammar_of(loose, use, parsing, wanted, added_token))


def _grammar_of(
    tools: Sequence[ToolSchema],
    use: ToolUse,
    parsing: Parsing,
    wanted: StructuredOutput | None,
    added_token: Callable[[str], int | None],
) -> StructuredOutput:
    marks = Marks(added_token)
    form = tool_formats.BY_NAME[parsing.formats.calls]
    calls = form.grammar(tools, use, marks)
    answer = None if wanted is None or use.must_call else _schema_of(wanted, is_possible=not calls.begins_as_json)
    before: Before = ("", [])
    if parsing.formats.reasoning == "think":
        before = think.grammar(is_open=parsing.is_reasoning_open, marks=marks)
    source = grammar_source(calls, use, marks, before=before, answer=answer)
    return StructuredOutput("llguidance", source.encode(), FIELD)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _schema_of(wanted: StructuredOutput, *, is_possible: bool) -> Any:
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
    return checked_schema(json.loads(wanted.body), wanted.field, is_strict=wanted.is_strict)
