"""Calls of Qwen3-Coder: `<tool_call>`, `<function=NAME>`, `<parameter=NAME>` value `</parameter>`, `</function>`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from router.text.output.framing import Framing, State, Tools, ToolUse
from router.text.output.grammars.calls import CallGrammar, Marks, ToolSchema, alternatives, json_rule
from router.text.output.prose import MarkMatcher
from router.text.output.values.admitted_values import Admitted, admitted_by, branches_of, may_be_text
from router.text.output.values.arguments_text import ArgumentsText
from router.text.output.values.json_scanner import quoted
from router.text.output.values.plain_value import PlainValue
from router.text.structured.json_schema import UnsupportedSchema
from twostroke.base.client_text import shown

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_PARAMETER, _END_PARAMETER, _END_FUNCTION = "<parameter=", "</parameter>", "</function>"

MAX_NAME = 256
"""Most characters of a function's or parameter's name, with the whitespace around it."""

_MAX_SPACE = 64
"""Most whitespace between two marks that end a value together."""
_FOLLOWING: Mapping[str, tuple[str, ...]] = {
    _END_PARAMETER: (_PARAMETER, _END_FUNCTION, CLOSE, OPEN, FUNCTION),
    _END_FUNCTION: (CLOSE, OPEN, FUNCTION),
    CLOSE: (OPEN, FUNCTION),
}
"""Marks that end a value, each with those that may follow it: otherwise it may be a part of the value."""

_NOTES = frozenset({"$comment", "$id", "$schema", "default", "description", "examples", "title"})
_ARGUMENT_KEYWORDS = _NOTES | {"$defs", "additionalProperties", "definitions", "properties", "required", "type"}
"""Keywords of a strict tool's schema that the grammar enforces, or that constrain nothing."""
_VALUE_KEYWORDS = _NOTES | {"$ref", "allOf", "anyOf", "const", "enum", "nullable", "oneOf", "type"}
"""Keywords of a parameter's schema that also hold for a value that is written as text, or constrain nothing."""
_TEXT_TYPES = frozenset({"array", "object", "string"})
"""Types that a text may be read as, if the schema admits any string."""


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of calls with parameters in the order of the schema, whose values are JSON or any text."""
    heads = [quoted(f"<function={tool.name}>") for tool in tools]
    calls = [f"{head} function_{index} {quoted(_END_FUNCTION)}" for index, head in enumerate(heads)]
    functions = [rule for index, tool in enumerate(tools) for rule in _function_rules(tool, index)]
    texts = (
        rf'any_parameter: {quoted(_PARAMETER)} /[^<>\n]{{1,{MAX_NAME}}}/ ">\n" string_value',
        r'string_value[lazy]: /(.|\n)*/ "\n</parameter>\n"',
    )
    call = rf'"\n" function "\n" {marks.term(CLOSE)}'
    return CallGrammar(OPEN, call, r'"\n"', (alternatives("function", calls), *functions, *texts), ending=r'"\n"?')


def _function_rules(tool: ToolSchema, index: int) -> Iterator[str]:
    properties, required = tool.properties, tool.parameters.get("required") or ()
    _refuse_arguments(tool)
    if properties is None:
        yield rf'function_{index}: "\n" any_parameter*'
        return
    names = [f"parameter_{index}_{number}{'' if name in required else '?'}" for number, name in enumerate(properties)]
    yield rf'function_{index}: "\n" {" ".join(names)}'
    for number, (name, schema) in enumerate(properties.items()):
        yield f"parameter_{index}_{number}: {quoted(f'{_PARAMETER}{name}>')} {_value(tool, name, schema)}"


def _value(tool: ToolSchema, name: str, schema: Any) -> str:
    """Returns the expression of a value between the opening mark and the next line.

    Strings stand without quotes, whatever else the schema admits: the parser reads them by the same schema.
    """
    admitted = admitted_by(tool.parameters, name)
    _refuse_keywords(tool, name, schema)
    if admitted.takes_text:
        return r'"\n" string_value'
    choices = [json.loads(each) for each in sorted(admitted.literals) if each.startswith('"')]
    written = [quoted(choice) for choice in choices if choice]
    if not admitted.is_text or not written:
        whole = {**schema, **_definitions(tool)} if isinstance(schema, dict) else {}
        written.append(json_rule(whole))
    return rf'"\n" ({" | ".join(written)}) "\n</parameter>\n"'


def _definitions(tool: ToolSchema) -> dict[str, Any]:
    return {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}


def _refuse_arguments(tool: ToolSchema) -> None:
    """Refuses keywords of a strict tool's schema that cannot be enforced, because calls list parameters one by one."""
    others = sorted(set(tool.parameters) - _ARGUMENT_KEYWORDS)
    if tool.properties is None and tool.parameters.get("additionalProperties") not in (None, True, {}):
        others.append("additionalProperties")
    if tool.is_strict and others:
        raise UnsupportedSchema(
            f"{tool.field}: {shown(others[0])} cannot be kept to in this model's format of calls", field=tool.field
        )


def _refuse_keywords(tool: ToolSchema, name: str, schema: Any) -> None:
    """Refuses keywords of a strict tool's parameter that cannot be enforced, because its value may be plain text."""
    admitted = admitted_by(tool.parameters, name)
    if not tool.is_strict or not may_be_text(admitted):
        return
    types = _TEXT_TYPES & admitted.types if admitted.takes_text else frozenset({"string"})
    branches = branches_of(tool.parameters, schema, types)
    others = {keyword for each in branches for keyword in set(each) - _VALUE_KEYWORDS}
    if others:
        field = f"{tool.field}.properties.{shown(name)}"
        raise UnsupportedSchema(
            f"{field}: {min(others)} cannot be kept to in this model's format of calls", field=field
        )


class Qwen3CoderSyntax:
    """Values are streamed as soon as they can be nothing but strings; others come whole.

    A newline after a parameter's opening mark and one before its closing mark are framing. A closing mark in the
    middle of a line does not end a value. It does if another mark follows, or if the value began in the line of its
    name. Closing marks may be left out: the value then ends where a mark follows that cannot be a part of it.
    """

    MARKS: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, FUNCTION)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._matcher = MarkMatcher(())
        self._name = ""
        self._tool: Mapping[str, Any] = {}
        """Schema of the arguments of the call that has begun last."""
        self._given: set[str] = set()
        """Parameters that the call has already."""
        self._arguments = ArgumentsText()
        self._value = PlainValue(Admitted(), self._arguments.write)
        self._is_unclosed = False
        """Whether a call has begun and its closing mark has not come."""
        self._ending = ""
        """Text with which the value may end."""
        self.state: State = self._prose

    def end(self) -> None:
        """Sends what was held back. A mark that only begins is text, or a part of the value unless it would end it."""
        if self.state == self._in_value:
            if not self._ending.startswith("</"):
                self._value.add(self._ending)
            self._value.flush()
        elif self.state == self._in_parameter_name:
            self._framing.hold(_PARAMETER + self._name)
        elif self.state in (self._opening, self._in_body):
            self._framing.hold(self._matcher.held)

    def _prose(self, char: str) -> bool:
        mark = self._framing.prose.take(char)
        if mark == OPEN:
            self._open()
        elif mark == FUNCTION:
            self._begin_name()
        elif mark and self._is_unclosed:
            self._framing.prose.end_call()
        elif mark:
            self._framing.prose.emit(mark)
        if mark:
            self._is_unclosed = False
        return True

    def _open(self) -> None:
        self._framing.hold(OPEN)
        self._matcher = MarkMatcher((FUNCTION,))
        self.state = self._opening

    def _opening(self, char: str) -> bool:
        if not self._matcher.held and char.isspace() and not self._framing.is_full:
            self._framing.hold(char)
            return True
        text, mark = self._matcher.take(char)
        if mark:
            self._begin_name()
        elif text:
            self._framing.hold(text[:-1])
            return self._to_prose()
        return True

    def _begin_name(self) -> None:
        self._framing.hold(FUNCTION)
        self._name = ""
        self.state = self._in_name

    def _in_name(self, char: str) -> bool:
        name = _name_in(self._name)
        if char in ">\n" and name in self._tools:
            self._arguments = ArgumentsText()
            self._framing.begin_call(name, self._arguments)
            self._tool, self._is_unclosed = self._tools[name], True
            self._given.clear()
            self._arguments.write("{")
            self._begin_body()
            return True
        if char in "<>\n" or len(self._name) >= MAX_NAME:
            return self._to_prose()
        self._name += char
        self._framing.hold(char)
        return True

    def _begin_body(self) -> None:
        self._matcher = MarkMatcher((_PARAMETER, _END_PARAMETER, _END_FUNCTION, CLOSE, OPEN, FUNCTION))
        self.state = self._in_body

    def _in_body(self, char: str) -> bool:
        if not self._matcher.held and char.isspace():
            return True
        text, mark = self._matcher.take(char)
        if mark == _PARAMETER:
            self._name = ""
            self.state = self._in_parameter_name
        elif mark and mark != _END_PARAMETER:
            self._end_body(mark)
        elif text:
            self._framing.hold(text[:-1])
            return self._to_prose()
        return True

    def _end_body(self, mark: str) -> None:
        """Ends the call at its own closing mark, or at the next mark if that is missing."""
        self._arguments.write("}")
        if mark == OPEN:
            self._open()
        elif mark == FUNCTION:
            self._begin_name()
        else:
            self._is_unclosed = mark != CLOSE
            self.state = self._prose

    def _in_parameter_name(self, char: str) -> bool:
        if char == ">" or (char == "\n" and self._is_declared(self._name)):
            self._begin_value()
            return char == ">"
        if char in "<\n" or len(self._name) >= MAX_NAME:
            self._framing.hold(_PARAMETER + self._name)
            return self._to_prose()
        self._name += char
        return True

    def _is_declared(self, written: str) -> bool:
        """Returns whether this names a parameter of the tool that the call does not have yet."""
        properties, name = self._tool.get("properties"), _name_in(written)
        return name not in self._given and isinstance(properties, Mapping) and name in properties

    def _begin_value(self) -> None:
        name = _name_in(self._name)
        self._arguments.write(f"{', ' if self._given else ''}{quoted(name)}: ")
        self._given.add(name)
        self._value = PlainValue(admitted_by(self._tool, name), self._arguments.write)
        self._ending = ""
        self.state = self._in_value

    def _in_value(self, char: str) -> bool:
        if not self._ending and char != "<":
            self._value.add(char)
            return True
        self._ending += char
        ends = self._ends_value
        if ends is None:
            return True
        ending, self._ending = self._ending, ""
        if ends:
            self._value.end()
            self._begin_body()
            self._take_again(ending)
        else:
            self._value.add(ending[0])
            self._take_again(ending[1:])
        return True

    @property
    def _ends_value(self) -> bool | None:
        """Returns whether the value ends with the text that was held back. None: that is not certain yet."""
        ending = self._ending
        if ending.startswith(_PARAMETER):
            return self._begins_next(ending.removeprefix(_PARAMETER))
        mark = next((mark for mark in _FOLLOWING if ending.startswith(mark)), None)
        if mark is None:
            return None if any(mark.startswith(ending) for mark in (*_FOLLOWING, _PARAMETER)) else False
        after_mark = ending.removeprefix(mark)
        if mark == _END_PARAMETER and (self._value.is_inline or self._value.is_at_line):
            return True
        if mark == CLOSE and after_mark == "\n" and self._value.is_at_line:
            return True
        following = after_mark.lstrip()
        if not following:
            return None if len(after_mark) < _MAX_SPACE else False
        if following in _FOLLOWING[mark]:
            return True
        return None if any(each.startswith(following) for each in _FOLLOWING[mark]) else False

    def _begins_next(self, name: str) -> bool | None:
        """Returns whether the next parameter begins although the closing mark of this one is missing."""
        if name.endswith(">"):
            return self._is_declared(name[:-1])
        return False if name.endswith(("<", "\n")) or len(name) > MAX_NAME else None

    def _take_again(self, text: str) -> None:
        for char in text:
            while not self.state(char):
                pass

    def _to_prose(self) -> bool:
        self._framing.give_up()
        self.state = self._prose
        return False


def _name_in(written: str) -> str:
    """Returns a name without the whitespace and the quotes that some models write around it."""
    name = written.strip()
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'" else name
