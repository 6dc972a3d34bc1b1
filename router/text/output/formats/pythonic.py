"""Calls of Llama 3.2 and 4 and others: the answer is a Python list of calls, `[name(city="Paris"), other()]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from router.text.output.framing import Framing, State, Tools, ToolUse
from router.text.output.grammars.calls import CallGrammar, Marks, ToolSchema, alternatives, refuse_strict
from router.text.output.values.arguments_text import ArgumentsText
from router.text.output.values.json_scanner import Progress, quoted
from router.text.output.values.python_value import PythonValue

START, END = "<|python_start|>", "<|python_end|>"

_VALUES = (
    r'value: STRING | NUMBER | "True" | "False" | "None" | list | dict',
    r'list: "[" (value (", " value)*)? "]"',
    r'dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"',
    r"""STRING: /"([^"\\\n]|\\[nrt"'\\])*"|'([^'\\\n]|\\[nrt"'\\])*'/""",
    r"NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    r"NUMBER: /-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?/",
)


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of lists of calls. Parameters have the order of the schema, each is given at most once, and
    values are any literals.
    """
    refuse_strict(tools, "pythonic")
    calls = [f'{quoted(tool.name + "(")} {_parameters(tool, index)} ")"' for index, tool in enumerate(tools)]
    parameters = [rule for index, tool in enumerate(tools) for rule in _parameter_rules(tool, index)]
    further = '(", " call)*' if use.is_parallel else ""
    rules = (alternatives("call", calls), *parameters, *_VALUES)
    return CallGrammar("", f'"[" call {further} "]"', None, rules, r"([^\[](.|\n)*)?")


def _parameters(tool: ToolSchema, index: int) -> str:
    if tool.properties is None:
        return '(NAME "=" value (", " NAME "=" value)*)?'
    needed = [name in _required(tool) for name in tool.properties]
    return f"from_{index}_0{'' if any(needed) else '?'}" if needed else ""


def _parameter_rules(tool: ToolSchema, index: int) -> Iterator[str]:
    """Yields one rule per parameter: it and any that follow. If it is optional, also only those that follow."""
    names = list(tool.properties or ())
    needed = [name in _required(tool) for name in names]
    for number, name in enumerate(names):
        written = f"{quoted(name + '=')} value"
        following = f"from_{index}_{number + 1}"
        if number + 1 == len(names):
            yield f"from_{index}_{number}: {written}"
            continue
        further = f'", " {following}' if any(needed[number + 1 :]) else f'(", " {following})?'
        without = "" if needed[number] else f" | {following}"
        yield f"from_{index}_{number}: {written} {further}{without}"


def _required(tool: ToolSchema) -> Sequence[str]:
    return tool.parameters.get("required") or ()


MAX_NAME = 256
"""Most characters of a function's or parameter's name."""


class PythonicSyntax:
    """A list is one of calls if it is at the answer's beginning, after the start mark, or after another such list."""

    MARKS: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._tool = self._name = ""
        self._has_begun = False
        self._parameters = 0
        self._arguments = ArgumentsText()
        self._value = PythonValue(self._arguments.write)
        self.state: State = self._prose

    def end(self) -> None:
        if self.state == self._in_value:
            self._value.end()
        elif self.state == self._in_parameter and not self._has_begun:
            self._framing.hold(self._name)

    def _prose(self, char: str) -> bool:
        prose = self._framing.prose
        if prose.is_blank and char == "[":
            self._framing.hold(char)
            self._begin_name()
        elif prose.take(char):
            self.state = self._opening
        return True

    def _opening(self, char: str) -> bool:
        if char == "[":
            self._framing.hold(char)
            self._begin_name()
            return True
        return self._framing.hold_space(char) or self._to_prose()

    def _begin_name(self) -> None:
        self._name = ""
        self.state = self._in_name

    def _in_name(self, char: str) -> bool:
        if char == "(" and self._name in self._tools:
            self._framing.hold(char)
            self._tool, self._has_begun, self._parameters = self._name, False, 0
            self.state = self._before_parameter
            return True
        if not self._name and char.isspace():
            return self._framing.hold_space(char) or self._to_prose()
        if not (char.isalnum() or char in "_.-") or len(self._name) >= MAX_NAME:
            return self._to_prose()
        self._name += char
        self._framing.hold(char)
        return True

    def _before_parameter(self, char: str) -> bool:
        if char.isspace():
            return self._has_begun or self._framing.hold_space(char) or self._to_prose()
        if char == ")":
            self._begin_call()
            return self._end_call()
        self._name = ""
        self.state = self._in_parameter
        return False

    def _in_parameter(self, char: str) -> bool:
        if char == "=" and self._name:
            self._begin_call()
            separator = ", " if self._parameters else ""
            self._parameters += 1
            self._arguments.write(f"{separator}{quoted(self._name.rstrip())}: ")
            self._value = PythonValue(self._arguments.write)
            self.state = self._in_value
            return True
        is_of_name = char.isalnum() or char == "_" or (char == " " and self._name)
        if not is_of_name or len(self._name) >= MAX_NAME:
            self._framing.hold(self._name)
            return self._to_prose()
        self._name += char
        return True

    def _begin_call(self) -> None:
        """Begins the call once it is certain that its arguments have names."""
        if not self._has_begun:
            self._has_begun = True
            self._arguments = ArgumentsText()
            self._framing.begin_call(self._tool, self._arguments)
            self._arguments.write("{")

    def _in_value(self, char: str) -> bool:
        progress = self._value.take(char)
        if progress is Progress.MORE:
            return True
        if progress is Progress.BROKEN:
            self._framing.hold(self._value.held)
            return self._to_prose()
        self.state = self._after_value
        return False

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self.state = self._before_parameter
            return True
        if char == ")":
            return self._end_call()
        return char.isspace() or self._to_prose()

    def _end_call(self) -> bool:
        self._arguments.write("}")
        self.state = self._after_call
        return True

    def _after_call(self, char: str) -> bool:
        if char == ",":
            self._framing.hold(char)
            self._begin_name()
            return True
        if char == "]":
            self._framing.accept()
            self.state = self._prose
            return True
        return self._framing.hold_space(char) or self._to_prose()

    def _to_prose(self) -> bool:
        self._framing.give_up()
        self.state = self._prose
        return False
