"""Prints an answer on a terminal while it arrives: the model's text, character by character.

Markdown is coloured and keeps its marks. Nothing is drawn twice, so nothing flickers and scrolled text stays right.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

BOLD, CODE, PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"
FENCES = ("```", "~~~")
_WIDE = "\u2e80-\uffef\U0001f000-\U0003ffff"
"""Characters of scripts without spaces, and pictures: a line may end between any two of them."""
_WORD = re.compile(f"\\s|[{_WIDE}]|[^\\s{_WIDE}]+")
_MARK = re.compile(r"(\*\*|`)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Shows control characters as ^X: a model must not send commands to the terminal."""
    return _CONTROL.sub(lambda found: f"^{chr(ord(found[0]) % 32 + 64)}", text)


class Screen:
    """Prints one answer. A word is printed when it is complete, so that lines end between words."""

    def __init__(self, write: Callable[[str], None], *, columns: int, has_colours: bool) -> None:
        self._write = write
        self._columns = columns
        self._has_colours = has_colours
        self._held = ""
        """Beginning of a word."""
        self._column = 0
        self._is_line_start = True
        self._fence = ""
        """Mark of the code block that is open."""
        self._is_heading = self._is_bold = self._is_code = False

    def add(self, piece: str) -> None:
        text, self._held = self._held + visible(piece), ""
        for found in _WORD.finditer(text):
            part = found[0]
            is_last = found.end() == len(text)
            if is_last and not part.isspace() and cell_len(part) == len(part) < self._columns:
                self._held = part  # more of it may come
            else:
                self._print(part)

    def end(self) -> None:
        """Prints what is left when the answer ends."""
        if self._held:
            self._print(self._held)
            self._held = ""
        if self._column:
            self._write("\n")
        self._column = 0

    def _print(self, part: str) -> None:
        if part == "\n":
            self._new_line()
        elif part.isspace():
            if self._column < self._columns:
                self._write(part)
                self._column += 1
        else:
            self._print_word(part)

    def _new_line(self) -> None:
        self._write("\n")
        self._column, self._is_line_start = 0, True
        self._is_heading = self._is_bold = self._is_code = False  # a mark that is never closed ends with its line

    def _print_word(self, word: str) -> None:
        if self._is_line_start:
            self._is_line_start = False
            if word[:3] == self._fence or (not self._fence and word[:3] in FENCES):
                self._write(self._coloured(word, CODE))
                self._column += cell_len(word)
                self._fence = "" if self._fence else word[:3]
                return
            self._is_heading = not self._fence and set(word) == {"#"}
        width = cell_len(word)
        if not self._fence and self._column > 0 and self._column + width > self._columns:
            self._write("\n")
            self._column = 0
        self._column = (self._column + width) % self._columns
        self._write(self._coloured(word, CODE) if self._fence else self._marked(word))

    def _marked(self, word: str) -> str:
        """Colours a word by the marks in it and the marks that are open."""
        shown = []
        for part in _MARK.split(word):
            was_code = self._is_code
            if part == "`":
                self._is_code = not self._is_code
            is_mark = part == "**" and not was_code
            if is_mark:
                self._is_bold = not self._is_bold
            if was_code or self._is_code:
                shown.append(self._coloured(part, CODE))
            elif self._is_bold or self._is_heading or is_mark:
                shown.append(self._coloured(part, BOLD))
            else:
                shown.append(part)
        return "".join(shown)

    def _coloured(self, text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if self._has_colours and text else text
