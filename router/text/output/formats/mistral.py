"""Calls of Mistral's models after `[TOOL_CALLS]`: a list of objects, or since Tekken v11 a name and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router.text.output.framing import Framing, State, Tools, ToolUse
from router.text.output.grammars.calls import (
    CallGrammar,
    Marks,
    ToolSchema,
    alternatives,
    arguments_rules,
    object_rules,
)
from router.text.output.values.arguments_text import ArgumentsText
from router.text.output.values.call_object import CallObject
from router.text.output.values.json_scanner import Progress, quoted

CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of names with arguments where the vocabulary has the mark between them, else of a list."""
    if marks.is_token(ARGUMENTS):
        calls = [f"{quoted(tool.name)} {marks.term(ARGUMENTS)} arguments_{index}" for index, tool in enumerate(tools)]
        return CallGrammar(CALLS, "named_call", "", (alternatives("named_call", calls), *arguments_rules(tools)))
    further = '(", " call_object)*' if use.is_parallel else ""
    return CallGrammar(CALLS, f'" [" call_object {further} "]"', None, object_rules(tools, "arguments"))


class MistralSyntax:
    MARKS: ClassVar[tuple[str, ...]] = (CALLS,)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._object = CallObject(tools, framing)
        self._arguments = ArgumentsText()
        self._head = ""
        """Name of the call and the marks after it."""
        self.state: State = self._prose

    def end(self) -> None: ...

    def _prose(self, char: str) -> bool:
        if self._framing.prose.take(char):
            self._head = ""
            self.state = self._opening
        return True

    def _opening(self, char: str) -> bool:
        if self._framing.hold_space(char):
            return True
        if char == "[":
            self._framing.hold(char)
            self.state = self._before_object
            return True
        if char == "{":
            return self._before_object(char)
        self.state = self._in_head
        return False

    def _before_object(self, char: str) -> bool:
        if char == "{":
            self._object = CallObject(self._tools, self._framing)
            self.state = self._in_object
            return False
        return self._framing.hold_space(char) or self._to_prose()

    def _in_object(self, char: str) -> bool:
        progress = self._object.take(char)
        if progress is Progress.MORE:
            return True
        if progress is Progress.BROKEN:
            return self._to_prose()
        self.state = self._after_object
        return True

    def _after_object(self, char: str) -> bool:
        if char == ",":
            self._framing.hold(char)
            self.state = self._before_object
            return True
        if char == "]":
            self._framing.accept()
            self.state = self._prose
            return True
        return self._framing.hold_space(char) or self._to_prose()

    def _in_head(self, char: str) -> bool:
        """Takes the name and the marks after it, up to the first character of the arguments.

        Arguments that are a string or null must follow `[ARGS]`.
        """
        has_mark = self._head.rstrip().endswith(ARGUMENTS)
        if char == "{" or (has_mark and not char.isspace()):
            name, _, rest = self._head.partition("[")
            if name.strip() not in self._tools or (rest and not has_mark):
                return self._to_prose()
            self._head = name.strip()
            self._arguments = ArgumentsText()
            self.state = self._in_arguments
            return False
        is_parted = char.isspace() and self._head.rstrip() not in self._tools and "[" not in self._head
        if is_parted or len(self._head) >= MAX_HEAD or self._framing.is_full:
            return self._to_prose()
        self._head += char
        self._framing.hold(char)
        return True

    def _in_arguments(self, char: str) -> bool:
        has_begun, progress = self._arguments.has_begun, self._arguments.take(char)
        if progress is Progress.BROKEN or (not has_begun and self._framing.is_full):
            return self._to_prose()
        if not has_begun and (self._arguments.has_begun or progress is Progress.DONE):
            self._framing.begin_call(self._head, self._arguments)
        elif not has_begun:
            self._framing.hold(char)
        if progress is Progress.DONE:
            self.state = self._prose
        return True

    def _to_prose(self) -> bool:
        self._framing.give_up()
        self.state = self._prose
        return False


MAX_HEAD = 256
"""Most characters of a name with the marks after it. Names have at most 64."""
