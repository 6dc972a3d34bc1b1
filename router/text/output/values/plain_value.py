"""Reads values that models write without quotes, by what the schema admits. Pure.

If the schema admits any string, a value is a string. Exceptions are null, and objects and lists in JSON, if the schema
admits these, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from router.text.output.values.admitted_values import Admitted
from router.text.output.values.json_scanner import MAX_DEPTH, JsonScanner, Progress, fixed, quoted
from router.text.output.values.python_value import PythonValue
from router.text.structured.references import canonical

MAX_WORD = 64
"""Most characters of a constant that a value is compared with as it arrives. If a longer one is possible, the value is
held until it is whole."""


class PlainValue:
    """One value as it comes. It is written as soon as it can be nothing but a string, or else at its end."""

    def __init__(self, admitted: Admitted, write: Callable[[str], None]) -> None:
        self._admitted = admitted
        self._write = write
        self._held: list[str] = []
        """Text of a value that may still be something else than a string."""
        self._held_chars = 0
        self._is_first = True
        self._is_string = self._has_newline = self._has_begun = False
        self.is_inline = False
        """Whether the value begins in the same line as its name."""
        if admitted.is_text:
            self._begin_string()

    @property
    def is_at_line(self) -> bool:
        """Whether what follows stands at the beginning of a line, or of the value."""
        return self._has_newline or not self._has_begun

    def add(self, text: str) -> None:
        """Adds to the value. A first and a last newline are not part of it."""
        for char in text:
            if self._is_first:
                self._is_first, self.is_inline = False, char != "\n"
                if char == "\n":
                    continue
            added = "\n" * self._has_newline + char
            self._has_newline, self._has_begun = char == "\n", True
            self._add(added[:-1] if self._has_newline else added)

    def flush(self) -> None:
        """Writes a value that was held back. A string stays open."""
        if not self._is_string:
            self.end()

    def end(self) -> None:
        self._write('"' if self._is_string else as_json("".join(self._held), self._admitted))

    def _add(self, text: str) -> None:
        if self._is_string:
            self._write(quoted(text)[1:-1])
            return
        self._held.append(text)
        self._held_chars += len(text)
        if self._held_chars > MAX_WORD + len(text):
            return  # it was not certain before
        if is_certain_text(begun := "".join(self._held), self._admitted):
            self._begin_string()
            self._write(quoted(begun)[1:-1])

    def _begin_string(self) -> None:
        self._is_string = True
        self._write('"')


_OPENING = {"{": "object", "[": "array"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}\.?[0-9]{0,400}|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,5})?")


def is_certain_text(begun: str, admitted: Admitted) -> bool:
    """Returns whether a value that begins so can only be a string, whatever follows."""
    if admitted.is_text:
        return True
    text = begun.strip()
    if not admitted.takes_text or not text or _OPENING.get(text[0]) in admitted.types:
        return False
    words = {each for each in admitted.literals if not each.startswith('"')}
    words |= {"null"} & admitted.types
    return not any(len(word) > MAX_WORD or word.startswith(text) for word in words)


def as_json(text: str, admitted: Admitted) -> str:
    """Returns a value as JSON text. What the schema does not admit is JSON where it can be read so, else a string."""
    stripped = text.strip()
    if admitted.is_text or quoted(text) in admitted.literals:
        return quoted(text)
    if canonical(stripped) in admitted.literals:
        return quoted(stripped)
    if admitted.takes_text:
        return _beside_text(stripped, admitted) or quoted(text)
    readings = list(_readings(stripped))
    for value, written in readings:
        if admitted.admits(value):
            return written
    has_texts = any(each.startswith('"') for each in admitted.literals)
    return quoted(text) if has_texts or not readings else readings[0][1]


def _beside_text(text: str, admitted: Admitted) -> str | None:
    """Returns the JSON text of a value that is no string although any string is admitted. None: it is a string."""
    read = _json(text)
    if read is None or isinstance(read[0], str):
        return None
    value, written = read
    is_admitted = canonical(value) in admitted.literals or (value is None and "null" in admitted.types)
    is_admitted |= isinstance(value, dict | list) and _OPENING[text[0]] in admitted.types
    return written if is_admitted else None


def _readings(text: str) -> Iterator[tuple[Any, str]]:
    """Yields what a text may mean that is not a string, as values and as JSON text."""
    if (read := _json(text)) is not None:
        yield read
        if isinstance(read[0], str) and (inner := _json(read[0].strip())) is not None:
            yield inner  # JSON text in a JSON string
        return
    if (word := _WORDS.get(text.lower())) is not None:
        yield json.loads(word), word
    if _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
        value = int(number) if number.is_integer() and abs(number) < 2**53 else number
        yield value, json.dumps(value)
    if text[:1] in ("{", "[", "(") and (written := _python(text)) is not None:
        yield json.loads(written), written


def _json(text: str) -> tuple[Any, str] | None:
    """Returns the value of JSON text, and the text without raw control characters. None: it is no JSON."""
    written = _scanned(text) if text[:1] in _OPENING else text
    try:
        return None if written is None else (json.loads(written, parse_constant=_refuse), written)
    except (ValueError, RecursionError):
        return None


def _scanned(text: str) -> str | None:
    """Returns an object or list that is whole, and not deeper than arguments may be."""
    scanner, written = JsonScanner(), list[str]()
    for index, char in enumerate(text):
        written.append(fixed(char, scanner.expects))
        progress = scanner.take(char)
        if progress is Progress.BROKEN or len(scanner.stack) >= MAX_DEPTH:
            return None
        if progress is Progress.DONE:
            return "".join(written) if index == len(text) - 1 else None
    return None


def _python(text: str) -> str | None:
    written: list[str] = []
    value = PythonValue(written.append)
    for char in text:
        if value.take(char) is not Progress.MORE:
            return None
    # A value that is whole does not take another character, and returns DONE.
    return "".join(written) if value.take("\n") is Progress.DONE else None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
