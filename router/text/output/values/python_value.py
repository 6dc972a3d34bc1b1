"""Turns one Python literal into JSON text, character by character."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable

from router.text.output.values.json_scanner import MAX_DEPTH, Progress, quoted

MAX_ATOM = 64
"""Most characters of a number or word."""

_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"'}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonValue:
    """Strings, numbers, True, False, None, and lists, tuples and dicts of them, with strings as keys.

    A value outside of brackets ends before the character that follows it: `take` then returns DONE, and has not taken
    that character.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._stack: list[str] = []
        """Closing brackets of what is open."""
        self._state = self._value
        self._quote = ""
        self._is_key = False
        self._is_first = True
        """Whether nothing is in the innermost bracket yet."""
        self.held = ""
        """Characters that are not emitted: of a number, a word, or an escape."""
        self._hex_left = 0

    def take(self, char: str) -> Progress:
        return self._state(char)

    def end(self) -> None:
        """Emits a number or word that was held back, at the end of the answer."""
        if self._state == self._atom and (written := _atom_json(self.held)) is not None:
            self._emit(written)

    def _value(self, char: str) -> Progress:
        if char.isspace():
            return Progress.MORE
        if self._stack and char == self._stack[-1]:
            return self._close()
        if self._stack and not self._is_first:
            self._emit(", ")
        self._is_key = bool(self._stack) and self._stack[-1] == "}"
        return self._begin(char)

    def _dict_value(self, char: str) -> Progress:
        """Takes what follows the colon in a dict."""
        return Progress.MORE if char.isspace() else self._begin(char)

    def _begin(self, char: str) -> Progress:
        if char in "'\"":
            self._quote = char
            self._emit('"')
            self._state = self._string
        elif self._is_key:
            return Progress.BROKEN
        elif char in "[({":
            if len(self._stack) + 1 >= MAX_DEPTH:  # the object of arguments is around it
                return Progress.BROKEN
            self._stack.append({"[": "]", "(": ")", "{": "}"}[char])
            self._emit("{" if char == "{" else "[")
            self._is_first, self._state = True, self._value
        elif char.isalnum() or char in "+-.":
            self.held, self._state = char, self._atom
        else:
            return Progress.BROKEN
        return Progress.MORE

    def _string(self, char: str) -> Progress:
        if char == self._quote:
            self._emit('"')
            self._state = self._colon if self._is_key else self._after
        elif char == "\\":
            self.held, self._state = char, self._escape
        else:
            self._emit(quoted(char)[1:-1])
        return Progress.MORE

    def _escape(self, char: str) -> Progress:
        if char in _HEX_DIGITS:
            self.held += char
            self._hex_left, self._state = _HEX_DIGITS[char], self._hex
            return Progress.MORE
        # A line's end after a backslash is not part of the string; an unknown escape stands for itself.
        text = "" if char == "\n" else _ESCAPED.get(char, self.held + char)
        self._end_escape(text)
        return Progress.MORE

    def _hex(self, char: str) -> Progress:
        if char not in "0123456789abcdefABCDEF":
            return Progress.BROKEN
        self.held += char
        self._hex_left -= 1
        if self._hex_left:
            return Progress.MORE
        code = int(self.held[2:], 16)
        if code > 0x10FFFF:
            return Progress.BROKEN
        is_half = 0xD800 <= code < 0xE000
        self._end_escape("" if is_half else chr(code))
        if is_half:
            self._emit(f"\\u{code:04x}")
        return Progress.MORE

    def _end_escape(self, text: str) -> None:
        self._emit(quoted(text)[1:-1])
        self.held, self._state = "", self._string

    def _atom(self, char: str) -> Progress:
        if char.isalnum() or char in "+-._":
            if len(self.held) >= MAX_ATOM:
                return Progress.BROKEN
            self.held += char
            return Progress.MORE
        written = _atom_json(self.held)
        if written is None:
            return Progress.BROKEN
        self._emit(written)
        self.held, self._state = "", self._after
        return self._after(char)

    def _colon(self, char: str) -> Progress:
        if char == ":":
            self._emit(": ")
            self._is_key, self._state = False, self._dict_value
            return Progress.MORE
        return Progress.MORE if char.isspace() else Progress.BROKEN

    def _after(self, char: str) -> Progress:
        if not self._stack:
            return Progress.DONE
        if char.isspace():
            return Progress.MORE
        if char == ",":
            self._is_first, self._state = False, self._value
            return Progress.MORE
        return self._close() if char == self._stack[-1] else Progress.BROKEN

    def _close(self) -> Progress:
        self._emit("}" if self._stack.pop() == "}" else "]")
        self._is_first, self._state = False, self._after
        return Progress.MORE


def _atom_json(text: str) -> str | None:
    """Returns a number or word as JSON; None for what is neither."""
    words = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
    if text in words:
        return words[text]
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, allow_nan=False) if type(value) in (int, float) else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
