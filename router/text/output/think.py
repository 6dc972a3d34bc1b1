"""Splits a model's reasoning, between `<think>` and `</think>`, from its answer."""

from __future__ import annotations

from collections.abc import Callable

from router.text.output.collected_parts import CollectedParts
from router.text.output.grammars.calls import Marks
from router.text.output.parts import Part
from router.text.output.prose import MarkMatcher

OPEN, CLOSE = "<think>", "</think>"


def grammar(*, is_open: bool, marks: Marks) -> tuple[str, list[str]]:
    """Returns the expression of reasoning before an answer, and its rules."""
    closing = rf"{marks.after_text(CLOSE)} /\n{{0,2}}/"
    return (closing if is_open else f"({marks.term(OPEN)} {closing})?"), [marks.lazy_rule(CLOSE)]


_CLOSING_NEWLINES = 2
"""Newlines after the closing mark that are framing: templates write a blank line there."""


class ThinkParser:
    """Reasoning is only at an answer's beginning.

    One newline after the opening mark, one before the closing mark and two after it are framing.
    """

    has_calls = False

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends with the opening mark."""
        self._parts = CollectedParts(str)
        self._matcher = MarkMatcher((CLOSE,) if is_open else (OPEN,))
        self._space = ""
        """Whitespace before an opening mark; or a newline in the reasoning, with which it may end."""
        self._newlines_left = 1 if is_open else 0
        self._take: Callable[[str], None] = self._reasoning if is_open else self._before

    def feed(self, text: str) -> list[Part]:
        for index, char in enumerate(text):
            if self._take == self._answer and not self._newlines_left:
                self._parts.add_text(text[index:])
                break
            self._take(char)
        return self._parts.take()

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        add = self._parts.add_reasoning if self._take == self._reasoning else self._parts.add_text
        add(self._space + self._matcher.held)
        self._space = self._matcher.held = ""
        return self._parts.take()

    def _before(self, char: str) -> None:
        if not self._matcher.held and char.isspace() and len(self._space) < MAX_SPACE:
            self._space += char
            return
        text, mark = self._matcher.take(char)
        if mark:
            self._space, self._newlines_left = "", 1
            self._matcher = MarkMatcher((CLOSE,))
            self._take = self._reasoning
        elif text:
            self._parts.add_text(self._space + text + self._matcher.held)
            self._space = self._matcher.held = ""
            self._take = self._answer

    def _reasoning(self, char: str) -> None:
        if self._newlines_left and char == "\n":
            self._newlines_left = 0
            return
        self._newlines_left = 0
        text, mark = self._matcher.take(char)
        if text:
            text = self._space + text
            self._space = "\n" if text.endswith("\n") else ""
            self._parts.add_reasoning(text.removesuffix("\n"))
        if mark:
            self._space, self._newlines_left = "", _CLOSING_NEWLINES
            self._take = self._answer

    def _answer(self, char: str) -> None:
        if self._newlines_left and char == "\n":
            self._newlines_left -= 1
            return
        self._newlines_left = 0
        self._parts.add_text(char)


MAX_SPACE = 64
"""Most whitespace before an opening mark. If there is more, the answer has begun."""
