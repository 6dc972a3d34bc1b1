"""Parts that a parser has made and not returned yet; adjoining pieces of one kind are joined."""

from __future__ import annotations

from collections.abc import Callable

from router.text.output.parts import Part, ReasoningPart, TextPart, ToolCallPart
from router.text.output.values.arguments_text import ArgumentsText

CallIds = Callable[[int], str]
"""Returns the id of a call by its index in the answer."""


class CollectedParts:
    def __init__(self, call_id: CallIds) -> None:
        self._call_id = call_id
        self._parts: list[Part] = []
        self._kind = ""
        self._pieces: list[str] = []
        """Text of the kind that is being collected."""
        self._arguments: ArgumentsText | None = None
        """Arguments of the last call, as long as nothing follows them."""
        self.calls = 0
        """Calls that have begun."""

    def add_text(self, text: str) -> None:
        self._add("text", text)

    def add_reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def begin_call(self, name: str, arguments: ArgumentsText) -> None:
        """Begins a call. Its arguments may grow until anything follows, which completes them."""
        self._end_call()
        self._join_pieces()
        self._parts.append(ToolCallPart(self.calls, self._call_id(self.calls), name))
        self.calls += 1
        self._arguments = arguments

    def end(self, *, is_cut: bool) -> None:
        """Ends the answer. Arguments of an answer that was cut stay incomplete."""
        if is_cut and self._arguments is not None:
            self._arguments.cut()
        self._end_call()

    def take(self) -> list[Part]:
        self._take_arguments()
        self._join_pieces()
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: str, text: str) -> None:
        if not text:
            return
        self._end_call()
        self._append(kind, text)

    def _append(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self._join_pieces()
            self._kind = kind
        self._pieces.append(text)

    def _take_arguments(self) -> None:
        if self._arguments is not None and (text := self._arguments.pop_ready()):
            self._append("arguments", text)

    def _end_call(self) -> None:
        if self._arguments is None:
            return
        rest = self._arguments.complete()
        self._take_arguments()
        self._arguments = None
        if rest:
            self._append("text", rest)

    def _join_pieces(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        match self._kind:
            case "text":
                self._parts.append(TextPart(text))
            case "reasoning":
                self._parts.append(ReasoningPart(text))
            case _:
                index = self.calls - 1
                self._parts.append(ToolCallPart(index, self._call_id(index), arguments=text))
