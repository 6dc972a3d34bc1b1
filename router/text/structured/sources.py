"""Kinds of structured output, and how each becomes llguidance's form: one line per kind. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from router.text.structured.json_schema import checked_schema
from router.text.structured.output import StructuredOutput
from twostroke.base.errors import InvalidRequest

WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"
"""Whitespace between parts of JSON: a space, or a line's end and the next line's indent.

So JSON comes compact or as it is printed, as models have learnt it. A small model cannot write whitespace for ever.
"""
ESCAPES = 'nrbtf\\"'
r"""Letters after a backslash in strings. Without `u` no name of a property can be spelt in two ways: llguidance would
take `"\u0061"` for another name than `"a"`. A control character without a letter of its own cannot be written."""

MOST_CHECKED_CHARS = 20_000
"""Most characters of a regex that is checked while a request is read, which takes some 20 ms, or 2 s for classes of
letters without case."""


def source_of(output: StructuredOutput) -> str:
    """Returns the grammar's source. Raises InvalidRequest that names the field."""
    if not output.body:
        raise InvalidRequest(f"{output.field} must not be empty", field=output.field)
    return SOURCES[output.kind](output)


def schema_of(output: StructuredOutput) -> Any:
    """Returns the checked schema of an output of JSON, an object. Raises UnsupportedSchema that names the field."""
    return checked_schema(json.loads(output.body), output.field, is_strict=output.is_strict, is_open=output.is_open)


def _json(output: StructuredOutput) -> str:
    checked = schema_of(output)
    text = json.dumps(checked, ensure_ascii=False, separators=(",", ":"))
    return LLMatcher.grammar_from_json_schema(text, overrides=json_options(has_whitespace=output.has_whitespace))


def json_options(*, has_whitespace: bool) -> Any:
    """Returns llguidance's options for a schema: `x-guidance` in it, or `overrides`."""
    spaces = {"whitespace_pattern": WHITESPACE} if has_whitespace else {"whitespace_flexible": False}
    return {
        "lenient": False,
        "coerce_one_of": False,
        "json_allowed_escapes": ESCAPES,
        "json_allow_general_unicode_escapes": False,
        **spaces,
    }


def _regex(output: StructuredOutput) -> str:
    return LLMatcher.grammar_from_regex(output.body.decode())


def check_regex(regex: str, field: str) -> None:
    """Checks a regex. Raises InvalidRequest, naming the field, if it is invalid, or too long to be checked at once."""
    if len(regex) > MOST_CHECKED_CHARS:
        raise InvalidRequest(
            f"{field} must have at most {MOST_CHECKED_CHARS} characters, got {len(regex)}", field=field
        )
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(regex))
    if problem:
        reasons = [line.removeprefix("error: ") for line in problem.splitlines() if line.startswith("error: ")]
        raise InvalidRequest(f"{field} is not a regex: {', '.join(reasons) or problem.splitlines()[0]}", field=field)


def _choice(output: StructuredOutput) -> str:
    """Returns the choices as a regex. It compiles many times faster than as many alternatives of a grammar."""
    return LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(output.body))))


def _literal(text: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _grammar(output: StructuredOutput) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(output.body.decode()))
    except RecursionError:
        raise
    except Exception as error:  # the library raises bare Exception, too
        reason = " ".join(str(error).split())
        raise InvalidRequest(f"{output.field} is not a grammar: {reason}", field=output.field) from error


def _llguidance(output: StructuredOutput) -> str:
    return output.body.decode()


SOURCES: Mapping[str, Callable[[StructuredOutput], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "llguidance": _llguidance,
}
"""Functions that make the source, by kind. `llguidance` is already a source, made by this router and not by clients."""
