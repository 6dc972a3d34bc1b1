"""Calls of Llama 3.1 and later: the answer is a JSON object with name and parameters, or several with `;` between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router.text.output.framing import Framing, State, Tools, ToolUse
from router.text.output.grammars.calls import CallGrammar, Marks, ToolSchema, object_rules
from router.text.output.values.call_object import CallObject
from router.text.output.values.json_scanner import Progress

PYTHON_TAG = "<|python_tag|>"


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of calls without the tag. An answer that begins with a brace is calls."""
    rules = object_rules(tools, "parameters")
    return CallGrammar("", "call_object", '"; "', rules, r"([^{](.|\n)*)?", begins_as_json=True)


class Llama3JsonSyntax:
    """An object is a call at the answer's beginning, after the tag, and after another call."""

    MARKS: ClassVar[tuple[str, ...]] = (PYTHON_TAG,)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._object = CallObject(tools, framing)
        self.state: State = self._prose

    def end(self) -> None: ...

    def _prose(self, char: str) -> bool:
        prose = self._framing.prose
        if prose.is_blank and char == "{":
            return self._begin_object()
        if prose.is_blank and char == ";" and self._framing.parts.calls:
            self._framing.hold(char)
            self.state = self._opening
        elif prose.take(char):
            self.state = self._opening
        return True

    def _opening(self, char: str) -> bool:
        if char == "{":
            return self._begin_object()
        if self._framing.hold_space(char):
            return True
        self._framing.give_up()
        self.state = self._prose
        return False

    def _begin_object(self) -> bool:
        self._object = CallObject(self._tools, self._framing)
        self.state = self._in_object
        return False

    def _in_object(self, char: str) -> bool:
        progress = self._object.take(char)
        if progress is Progress.MORE:
            return True
        self._framing.give_up()
        self.state = self._prose
        return progress is Progress.DONE
