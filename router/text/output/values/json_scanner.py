"""Scans one JSON value character by character, and finds where it ends or breaks."""

from __future__ import annotations

import enum
import json

MAX_DEPTH = 512
"""Objects and lists inside one another; a deeper value breaks, as Python's own parser would at some depth."""

_SPACE = " \t\n\r"
_LITERALS = frozenset(word[:end] for word in ("true", "false", "null") for end in range(1, len(word) + 1))
_WHOLE = frozenset({"true", "false", "null"})


class Progress(enum.Enum):
    MORE = enum.auto()
    DONE = enum.auto()
    """The value ended with this character."""
    BROKEN = enum.auto()
    """This character cannot follow."""


class Expects(enum.Enum):
    """What may come next."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    WORD = enum.auto()


class JsonScanner:
    """Takes an object or a list. Raw control characters in strings are let through: `fixed` escapes them."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        """Opening brackets around the present place."""
        self.expects = Expects.VALUE
        self.is_key = False
        """Whether the string that was read last, or is being read, is the name of an entry."""
        self._atom = ""
        """Characters of the number or word so far: numbers end with the character after them."""
        self._hex_left = 0

    @property
    def is_whole_number(self) -> bool:
        """Whether the text ends with a number that may end there."""
        return self.expects is Expects.NUMBER and self._atom in _WHOLE_NUMBERS

    def skip_value(self) -> None:
        """Goes on after a value that another reader has taken."""
        assert self.expects is Expects.VALUE, self.expects
        self.expects = Expects.COMMA_OR_END

    def take(self, char: str) -> Progress:
        match self.expects:
            case Expects.STRING:
                return self._in_string(char)
            case Expects.ESCAPE:
                return self._in_escape(char)
            case Expects.HEX:
                self._hex_left -= 1
                if self._hex_left == 0:
                    self.expects = Expects.STRING
                return Progress.MORE if char in "0123456789abcdefABCDEF" else Progress.BROKEN
            case Expects.NUMBER | Expects.WORD:
                return self._in_atom(char)
            case _ if char in _SPACE:
                return Progress.MORE
            case Expects.VALUE | Expects.VALUE_OR_END:
                return self._begin_value(char)
            case Expects.KEY | Expects.KEY_OR_END:
                return self._begin_key(char)
            case Expects.COLON:
                self.expects = Expects.VALUE
                return Progress.MORE if char == ":" else Progress.BROKEN
            case _:
                return self._after_value(char)

    def _in_string(self, char: str) -> Progress:
        if char == '"':
            self.expects = Expects.COLON if self.is_key else Expects.COMMA_OR_END
        elif char == "\\":
            self.expects = Expects.ESCAPE
        return Progress.MORE

    def _in_escape(self, char: str) -> Progress:
        if char == "u":
            self.expects, self._hex_left = Expects.HEX, 4
            return Progress.MORE
        self.expects = Expects.STRING
        return Progress.MORE if char in '"\\/bfnrt' else Progress.BROKEN

    def _in_atom(self, char: str) -> Progress:
        if self.expects is Expects.WORD:
            self._atom += char
            if self._atom not in _LITERALS:
                return Progress.BROKEN
            if self._atom in _WHOLE:
                self.expects = Expects.COMMA_OR_END
            return Progress.MORE
        if (after := _NUMBER.get((self._atom, _class_of(char)))) is not None:
            self._atom = after
            return Progress.MORE
        if self._atom not in _WHOLE_NUMBERS:
            return Progress.BROKEN
        self.expects = Expects.COMMA_OR_END
        return self.take(char)

    def _begin_value(self, char: str) -> Progress:
        if char == "]" and self.expects is Expects.VALUE_OR_END:
            return self._close("[")
        if char in "{[":
            self.stack.append(char)
            self.expects = Expects.KEY_OR_END if char == "{" else Expects.VALUE_OR_END
            return Progress.MORE if len(self.stack) <= MAX_DEPTH else Progress.BROKEN
        if not self.stack:
            return Progress.BROKEN
        if char == '"':
            self.expects, self.is_key = Expects.STRING, False
        elif (number := _NUMBER.get(("", _class_of(char)))) is not None:
            self.expects, self._atom = Expects.NUMBER, number
        elif char in _LITERALS:
            self.expects, self._atom = Expects.WORD, char
        else:
            return Progress.BROKEN
        return Progress.MORE

    def _begin_key(self, char: str) -> Progress:
        if char == "}" and self.expects is Expects.KEY_OR_END:
            return self._close("{")
        self.expects, self.is_key = Expects.STRING, True
        return Progress.MORE if char == '"' else Progress.BROKEN

    def _after_value(self, char: str) -> Progress:
        if char == ",":
            self.expects = Expects.KEY if self.stack[-1] == "{" else Expects.VALUE
            return Progress.MORE
        if char in "}]":
            return self._close("{" if char == "}" else "[")
        return Progress.BROKEN

    def _close(self, opened: str) -> Progress:
        if self.stack[-1] != opened:
            return Progress.BROKEN
        self.stack.pop()
        self.expects = Expects.COMMA_OR_END
        return Progress.MORE if self.stack else Progress.DONE


_CONTROL = {code: f"\\u{code:04x}" for code in range(0x20)} | {9: "\\t", 10: "\\n", 13: "\\r"}


def quoted(text: str) -> str:
    """Returns a text as a string of JSON."""
    return json.dumps(text, ensure_ascii=False)


def fixed(char: str, expects: Expects) -> str:
    """Returns a character as JSON allows it where `expects` comes next: control characters in strings are escaped."""
    return char.translate(_CONTROL) if expects is Expects.STRING else char


def _class_of(char: str) -> str:
    if char in "123456789":
        return "1"
    return "e" if char == "E" else char


_NUMBER: dict[tuple[str, str], str] = {
    ("", "-"): "-",
    ("", "0"): "0",
    ("", "1"): "1",
    ("-", "0"): "0",
    ("-", "1"): "1",
    ("1", "0"): "1",
    ("1", "1"): "1",
    ("0", "."): ".",
    ("1", "."): ".",
    ("0", "e"): "e",
    ("1", "e"): "e",
    (".", "0"): ".1",
    (".", "1"): ".1",
    (".1", "0"): ".1",
    (".1", "1"): ".1",
    (".1", "e"): "e",
    ("e", "+"): "e+",
    ("e", "-"): "e+",
    ("e", "0"): "e1",
    ("e", "1"): "e1",
    ("e+", "0"): "e1",
    ("e+", "1"): "e1",
    ("e1", "0"): "e1",
    ("e1", "1"): "e1",
}
"""The automaton of numbers: (state, class of character) to state."""
_WHOLE_NUMBERS = frozenset({"0", "1", ".1", "e1"})
"""States in which a number may end."""
