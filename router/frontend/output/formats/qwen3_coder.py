"""Calls of Qwen3-Coder: `<tool_call>`, `<function=NAME>`, `<parameter=NAME>` value `</parameter>`, `</function>`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from router.frontend.output.framing import MAX_HELD, Framing, State, Tools
from router.frontend.output.marks import Marks, quoted
from router.frontend.output.prose import MarkMatcher
from router.frontend.output.tool_grammar import CallGrammar, ToolSchema, alternatives, json_rule
from router.frontend.output.tool_use import ToolUse
from router.frontend.structured.json_schema import UnsupportedSchema
from twostroke.client_text import shown

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_PARAMETER, _END_PARAMETER, _END_FUNCTION = "<parameter=", "</parameter>", "</function>"

MAX_NAME = 256
"""Characters of a function's or parameter's name, and of the whitespace around it."""

_NOTES = frozenset({"$comment", "$id", "$schema", "default", "description", "examples", "title"})
_ARGUMENT_KEYWORDS = _NOTES | {"$defs", "additionalProperties", "definitions", "properties", "required", "type"}
"""Keywords of a strict tool's arguments that a call keeps to, or that ask for nothing."""
_VALUE_KEYWORDS = frozenset({"type", "description", "title", "default", "examples"})
"""Keywords of a string that its text may ignore."""


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of calls with parameters in the order of the schema, whose values are JSON or any text."""
    heads = [quoted(f"<function={tool.name}>") for tool in tools]
    calls = [f"{head} function_{rank} {quoted(_END_FUNCTION)}" for rank, head in enumerate(heads)]
    functions = [rule for rank, tool in enumerate(tools) for rule in _function_rules(tool, rank)]
    texts = (
        rf'any_parameter: {quoted(_PARAMETER)} /[^<>\n]{{1,{MAX_NAME}}}/ ">\n" string_value',
        r'string_value[lazy]: /(.|\n)*/ "\n</parameter>\n"',
    )
    call = rf'"\n" function "\n" {marks.term(CLOSE)}'
    return CallGrammar(OPEN, call, r'"\n"', (alternatives("function", calls), *functions, *texts), ending=r'"\n"?')


def _function_rules(tool: ToolSchema, rank: int) -> Iterator[str]:
    properties, required = tool.properties, tool.parameters.get("required") or ()
    _refuse_arguments(tool)
    if properties is None:
        yield rf'function_{rank}: "\n" any_parameter*'
        return
    names = [f"parameter_{rank}_{number}{'' if name in required else '?'}" for number, name in enumerate(properties)]
    yield rf'function_{rank}: "\n" {" ".join(names)}'
    for number, (name, schema) in enumerate(properties.items()):
        yield f"parameter_{rank}_{number}: {quoted(f'{_PARAMETER}{name}>')} {_value(tool, name, schema)}"


def _value(tool: ToolSchema, name: str, schema: Any) -> str:
    """Returns the expression of a value between the opening mark and the next line."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        whole = {**schema, **_definitions(tool)} if isinstance(schema, dict) else {}
        return rf'"\n" {json_rule(whole)} "\n</parameter>\n"'
    if isinstance(values := schema.get("enum"), list):
        choices = " | ".join(quoted(str(value)) for value in values)
        return rf'"\n" ({choices}) "\n</parameter>\n"'
    _refuse_keywords(tool, name, schema)
    return r'"\n" string_value'


def _definitions(tool: ToolSchema) -> dict[str, Any]:
    return {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}


def _refuse_arguments(tool: ToolSchema) -> None:
    """Refuses what the parameters of a strict tool cannot be kept to, whose calls name them one by one."""
    others = sorted(set(tool.parameters) - _ARGUMENT_KEYWORDS)
    if tool.properties is None and tool.parameters.get("additionalProperties") not in (None, True, {}):
        others.append("additionalProperties")
    if tool.is_strict and others:
        raise UnsupportedSchema(
            f"{tool.field}: {shown(others[0])} cannot be kept to in this model's format of calls", field=tool.field
        )


def _refuse_keywords(tool: ToolSchema, name: str, schema: dict[str, Any]) -> None:
    """Refuses what the text of a strict tool's string cannot be kept to."""
    others = sorted(set(schema) - _VALUE_KEYWORDS)
    if tool.is_strict and others:
        field = f"{tool.field}.properties.{shown(name)}"
        raise UnsupportedSchema(f"{field}: {others[0]} cannot be kept to in this model's format of calls", field=field)


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderSyntax:
    """Values of parameters that are strings are streamed; others are JSON where they can be read as such.

    A newline behind a parameter's opening mark and one before its closing mark are framing.
    """

    MARKS: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, FUNCTION)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._matcher = MarkMatcher(())
        self._name = ""
        self._strings: frozenset[str] = frozenset()
        self._parameters = 0
        self._value: list[str] = []
        """A value that is not streamed."""
        self._value_chars = 0
        self._is_string = self._is_value_begun = self._has_newline = self._is_unclosed = False
        self.state: State = self._prose

    def end(self) -> None:
        """Sends what was held back; a mark that has only begun is text, or a part of the value."""
        if self.state == self._in_value:
            self._add_value("\n" * (self._has_newline and bool(self._matcher.held)) + self._matcher.held)
            if not self._is_string and self._value:
                self._framing.parts.add_arguments(_as_json("".join(self._value)))
        elif self.state == self._in_parameter_name:
            self._framing.hold(_PARAMETER + self._name)
        elif self.state in (self._opening, self._in_body):
            self._framing.hold(self._matcher.held)

    def _prose(self, char: str) -> bool:
        mark = self._framing.prose.take(char)
        if mark == OPEN:
            self._framing.hold(mark)
            self._matcher = MarkMatcher((FUNCTION,))
            self.state = self._opening
        elif mark == FUNCTION:
            self._begin_name(mark)
        elif mark and self._is_unclosed:
            self._framing.prose.end_call()
        elif mark:
            self._framing.prose.emit(mark)
        if mark:
            self._is_unclosed = False
        return True

    def _opening(self, char: str) -> bool:
        if not self._matcher.held and char.isspace() and not self._framing.is_full:
            self._framing.hold(char)
            return True
        text, mark = self._matcher.take(char)
        if mark:
            self._begin_name(mark)
        elif text:
            self._framing.hold(text[:-1])
            return self._to_prose()
        return True

    def _begin_name(self, mark: str) -> None:
        self._framing.hold(mark)
        self._name = ""
        self.state = self._in_name

    def _in_name(self, char: str) -> bool:
        if char == ">" and self._name in self._tools:
            self._framing.begin_call(self._name)
            self._strings, self._parameters, self._is_unclosed = self._tools[self._name], 0, True
            self._framing.parts.add_arguments("{")
            self._begin_body()
            return True
        if char in "<>\n" or len(self._name) >= MAX_NAME:
            return self._to_prose()
        self._name += char
        self._framing.hold(char)
        return True

    def _begin_body(self) -> None:
        self._matcher = MarkMatcher((_PARAMETER, _END_FUNCTION))
        self.state = self._in_body

    def _in_body(self, char: str) -> bool:
        if not self._matcher.held and char.isspace():
            return True
        text, mark = self._matcher.take(char)
        if mark == _PARAMETER:
            self._name = ""
            self.state = self._in_parameter_name
        elif mark:
            self._framing.parts.add_arguments("}")
            self.state = self._prose
        elif text:
            self._framing.hold(text[:-1])
            return self._to_prose()
        return True

    def _in_parameter_name(self, char: str) -> bool:
        if char == ">":
            self._begin_value()
            return True
        if char in "<\n" or len(self._name) >= MAX_NAME:
            self._framing.hold(_PARAMETER + self._name)
            return self._to_prose()
        self._name += char
        return True

    def _begin_value(self) -> None:
        separator = ", " if self._parameters else ""
        self._parameters += 1
        self._framing.parts.add_arguments(f"{separator}{_quoted(self._name)}: ")
        self._is_string = self._name in self._strings
        if self._is_string:
            self._framing.parts.add_arguments('"')
        self._value.clear()
        self._value_chars = 0
        self._is_value_begun = self._has_newline = False
        self._matcher = MarkMatcher((_END_PARAMETER,))
        self.state = self._in_value

    def _in_value(self, char: str) -> bool:
        text, mark = self._matcher.take(char)
        if text and not self._is_value_begun:
            self._is_value_begun = True
            text = text.removeprefix("\n")
        if text:
            text = "\n" * self._has_newline + text
            self._has_newline = text.endswith("\n")
            self._add_value(text[:-1] if self._has_newline else text)
        if mark:
            self._framing.parts.add_arguments('"' if self._is_string else _as_json("".join(self._value)))
            self._begin_body()
        return True

    def _add_value(self, text: str) -> None:
        if not self._is_string:
            self._value.append(text)
            self._value_chars += len(text)
            if self._value_chars <= MAX_HELD:
                return
            # Too long to wait for: from here on it is a string.
            self._is_string = True
            self._framing.parts.add_arguments('"')
            text = "".join(self._value)
        self._framing.parts.add_arguments(_quoted(text)[1:-1])

    def _to_prose(self) -> bool:
        self._framing.give_up()
        self.state = self._prose
        return False


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    """Returns a value as JSON: as it stands where it is JSON, as a string otherwise."""
    written = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return written


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
