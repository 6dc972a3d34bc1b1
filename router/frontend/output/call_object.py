"""A tool call written as a JSON object with a name and arguments, as most formats write it."""

from __future__ import annotations

import json
from collections.abc import Container

from router.frontend.output.framing import Framing
from router.frontend.output.json_scanner import Expects, JsonScanner, Progress, fixed

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
"""Entries that some models add; their values are dropped."""


class CallObject:
    """Takes the characters of one object, the opening brace first.

    The call begins once the name is known, is that of a tool, and the arguments have begun or the object has ended.
    """

    def __init__(self, tools: Container[str], framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._scanner = JsonScanner()
        self._key = ""
        self._name: str | None = None
        self._recorded: list[str] | None = None
        """Characters of the key or the name that is being read."""
        self._arguments: list[str] = []
        """Arguments from before the name was known."""
        self._in_arguments = self._has_arguments = False
        self.has_begun = False
        """The call has begun: it is a call, however it goes on."""

    def take(self, char: str) -> Progress:
        """Returns BROKEN for a character that cannot follow: it is not held, and no part of the call."""
        if not self.has_begun and self._framing.is_full:
            return Progress.BROKEN
        expected, depth = self._scanner.expects, len(self._scanner.stack)
        progress = self._scanner.take(char)
        if progress is Progress.DONE and not self._end():
            progress = Progress.BROKEN
        if progress is Progress.MORE:
            progress = self._take_inside(char, expected, depth)
        if progress is not Progress.BROKEN and not self.has_begun:
            self._framing.hold(char)
        return progress

    def _take_inside(self, char: str, expected: Expects, depth: int) -> Progress:
        if self._in_arguments:
            self._take_argument(fixed(char, expected))
            self._in_arguments = len(self._scanner.stack) > 1
            return Progress.MORE
        # Entries that are dropped may have anything inside.
        return self._take_entry(char, expected) if depth == 1 else Progress.MORE

    def _take_entry(self, char: str, expected: Expects) -> Progress:
        if expected in (Expects.KEY, Expects.KEY_OR_END) and char == '"':
            self._recorded = [char]
        elif expected is Expects.VALUE and not char.isspace():
            return self._begin_value(char)
        elif self._recorded is not None:
            self._recorded.append(char)
            if self._scanner.expects in (Expects.COLON, Expects.COMMA_OR_END):
                return self._end_string("".join(self._recorded))
        return Progress.MORE

    def _begin_value(self, char: str) -> Progress:
        if self._key in _ARGUMENTS:
            if char != "{" or self._has_arguments:
                return Progress.BROKEN
            self._in_arguments = self._has_arguments = True
            if self._name is not None:
                self._begin()
            self._take_argument(char)
        elif self._key == "name":
            if char != '"' or self._name is not None:
                return Progress.BROKEN
            self._recorded = [char]
        return Progress.MORE

    def _end_string(self, text: str) -> Progress:
        self._recorded = None
        try:
            value = str(json.loads(text))
        except ValueError:  # a raw control character
            return Progress.BROKEN
        if self._scanner.expects is Expects.COLON:
            self._key = value
            return Progress.MORE if value in ("name", *_ARGUMENTS, *_OTHERS) else Progress.BROKEN
        if value not in self._tools:
            return Progress.BROKEN
        self._name = value
        if self._has_arguments:
            self._begin()
        return Progress.MORE

    def _begin(self) -> None:
        assert self._name is not None
        self.has_begun = True
        self._framing.begin_call(self._name)
        self._framing.parts.add_arguments("".join(self._arguments))
        self._arguments.clear()

    def _take_argument(self, text: str) -> None:
        if self.has_begun:
            self._framing.parts.add_arguments(text)
        else:
            self._arguments.append(text)

    def _end(self) -> bool:
        """Tells whether the object that ends is a call."""
        if self._name is not None and not self.has_begun:
            self._begin()
            self._framing.parts.add_arguments("{}")
        return self.has_begun
