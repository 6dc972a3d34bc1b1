"""Parts that a parser has made and not returned yet; adjoining pieces of one kind are joined."""

from __future__ import annotations

from collections.abc import Callable

from router.frontend.output.parts import Part, ReasoningPart, TextPart, ToolCallPart

CallIds = Callable[[int], str]
"""Returns the id of a call by its rank in the answer."""


class CollectedParts:
    def __init__(self, call_id: CallIds) -> None:
        self._call_id = call_id
        self._parts: list[Part] = []
        self._kind = ""
        self._pieces: list[str] = []
        """Text of the kind that is being collected."""
        self.calls = 0
        """Calls that have begun."""

    def add_text(self, text: str) -> None:
        self._add("text", text)

    def add_reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def begin_call(self, name: str) -> None:
        self._close()
        self._parts.append(ToolCallPart(self.calls, self._call_id(self.calls), name))
        self.calls += 1

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments of the call that has begun last."""
        self._add("arguments", text)

    def take(self) -> list[Part]:
        self._close()
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: str, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._pieces.append(text)

    def _close(self) -> None:
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
                rank = self.calls - 1
                self._parts.append(ToolCallPart(rank, self._call_id(rank), arguments=text))
