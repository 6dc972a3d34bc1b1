"""Text around tool calls: finds the marks at which calls may begin, and holds back whitespace next to calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_SPACE = 64
"""Whitespace held back because a call may follow; a longer run is text."""


class MarkMatcher:
    """Finds marks in text that comes one character at a time.

    The first character of each mark is nowhere else in it. So if text turns out to be no mark, another mark can only
    begin at its last character or later.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        assert all(mark and mark[0] not in mark[1:] for mark in marks)
        self._beginnings = frozenset(mark[:end] for mark in marks for end in range(1, len(mark) + 1))
        self._marks = frozenset(marks)
        self.held = ""
        """A prefix of a mark with which the text ends."""

    def take(self, char: str) -> tuple[str, str]:
        """Returns the held text and `char` as far as they are no mark, and the mark that ends with `char`, or ""."""
        held = self.held + char
        if held in self._marks:
            self.held = ""
            return "", held
        if held in self._beginnings:
            self.held = held
            return "", ""
        if not self.held:
            return char, ""
        lost, self.held = self.held, ""
        rest, mark = self.take(char)
        return lost + rest, mark


class Prose:
    """Whitespace directly before and after a call is framing; all other text goes to `emit`."""

    def __init__(self, marks: Sequence[str], emit: Callable[[str], None]) -> None:
        self._matcher = MarkMatcher(marks)
        self._emit = emit
        self._space = ""
        self.is_blank = True
        """Whether there was nothing but whitespace since the answer's beginning, or since the last call."""
        self._follows_call = False

    def take(self, char: str) -> str:
        """Returns the mark that ends with this character, or "". The mark is not emitted."""
        if not self._matcher.held and char.isspace():
            self._take_space(char)
            return ""
        text, mark = self._matcher.take(char)
        if text:
            self.emit(text)
        return mark

    def emit(self, text: str) -> None:
        """Emits text, and the whitespace before it unless that follows a call."""
        if self._space:
            self._emit(self._space)
            self._space = ""
        self.is_blank = self._follows_call = False
        self._emit(text)

    def end_call(self) -> None:
        """Drops the whitespace before a call that has begun, and what will follow it."""
        self._space = ""
        self.is_blank = self._follows_call = True

    def flush(self) -> None:
        """Emits what was held back. A prefix of a mark directly after a call is framing."""
        held, self._matcher.held = self._matcher.held, ""
        if held and not self._follows_call:
            self.emit(held)
        elif self._space:
            self._emit(self._space)
        self._space = ""

    def _take_space(self, char: str) -> None:
        if self._follows_call:
            return
        self._space += char
        if len(self._space) >= MAX_SPACE:
            self._emit(self._space)
            self._space = ""
