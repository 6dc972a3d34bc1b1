"""Calls of Hermes and Qwen: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router.frontend.output.call_object import CallObject
from router.frontend.output.framing import Framing, State, Tools
from router.frontend.output.json_scanner import Progress
from router.frontend.output.marks import Marks
from router.frontend.output.tool_grammar import CallGrammar, ToolSchema, object_rules
from router.frontend.output.tool_use import ToolUse

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of calls as Qwen's templates write them."""
    call = rf'"\n" call_object "\n" {marks.term(CLOSE)}'
    return CallGrammar(OPEN, call, r'"\n"', object_rules(tools, "arguments"), ending=r'"\n"?')


class HermesSyntax:
    MARKS: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._object = CallObject(tools, framing)
        self._is_unclosed = False
        """A call has begun whose closing mark has not come."""
        self.state: State = self._prose

    def end(self) -> None: ...

    def _prose(self, char: str) -> bool:
        mark = self._framing.prose.take(char)
        if mark == OPEN:
            self._framing.hold(mark)
            self.state = self._opening
        elif mark and self._is_unclosed:
            self._framing.prose.end_call()
        elif mark:
            self._framing.prose.emit(mark)
        if mark:
            self._is_unclosed = False
        return True

    def _opening(self, char: str) -> bool:
        if char.isspace() and not self._framing.is_full:
            self._framing.hold(char)
            return True
        self._object = CallObject(self._tools, self._framing)
        self.state = self._in_object
        return False

    def _in_object(self, char: str) -> bool:
        progress = self._object.take(char)
        self._is_unclosed = self._object.has_begun
        if progress is Progress.MORE:
            return True
        self._framing.give_up()
        self.state = self._prose
        return progress is Progress.DONE
