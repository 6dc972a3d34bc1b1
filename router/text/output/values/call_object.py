"""A tool call written as a JSON object with a name and arguments, as most formats write it."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence

from router.text.output.framing import Framing
from router.text.output.values.arguments_text import ArgumentsText
from router.text.output.values.json_scanner import Expects, JsonScanner, Progress

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
"""Entries that some models add; their values are dropped."""


class CallObject:
    """Takes the characters of one object, the opening brace first.

    The call begins once the name is known, is that of a tool, and the arguments have begun or the object has ended.
    """

    def __init__(
        self, tools: Container[str], framing: Framing, *, needs_arguments: bool = False, is_plain: bool = False
    ) -> None:
        """`needs_arguments`: a name without arguments makes no call, as in an object that no mark announces.

        `is_plain`: the name comes first, without escapes, and then an object.
        """
        self._tools = tools
        self._framing = framing
        self._needs_arguments = needs_arguments
        self._is_plain = is_plain
        self._scanner = JsonScanner()
        self._key = ""
        self._name: str | None = None
        self._recorded: list[str] | None = None
        """Characters of the key or the name that is being read."""
        self._arguments: ArgumentsText | None = None
        self._in_arguments = False
        self._is_doubled = False
        """Whether its braces are double, as in the example that templates of Qwen2.5-Coder show."""
        self._is_ended = False
        """Whether the object has ended, apart from a second closing brace."""
        self.has_begun = False
        """Whether the call has begun: it is a call, whatever follows."""

    def take(self, char: str) -> Progress:
        """Takes the next character. Returns BROKEN if it cannot follow, so that it is not part of the call."""
        if not self.has_begun and self._framing.is_full:
            return Progress.BROKEN
        progress = self._take_in_arguments(char) if self._in_arguments else self._take_outside(char)
        if progress is not Progress.BROKEN and not self.has_begun:
            self._framing.hold(char)
        return progress

    def _take_in_arguments(self, char: str) -> Progress:
        assert self._arguments is not None
        progress = self._arguments.take(char)
        if progress is Progress.BROKEN:
            return progress
        if progress is Progress.DONE:
            self._in_arguments = False
            self._scanner.skip_value()
        if self._name is not None and not self.has_begun and self._has_arguments:
            self._begin(self._name, self._arguments)
        return Progress.MORE

    @property
    def _has_arguments(self) -> bool:
        """Whether the arguments have begun. If they are null, there are none, and this is true, too."""
        return self._arguments is not None and (self._arguments.has_begun or not self._in_arguments)

    def _take_outside(self, char: str) -> Progress:
        if self._is_ended:
            return self._take_second_brace(char)
        expected, depth = self._scanner.expects, len(self._scanner.stack)
        if expected is Expects.VALUE and depth == 1 and self._key in _ARGUMENTS and not char.isspace():
            return self._begin_arguments(char)
        if expected is Expects.KEY_OR_END and char == "{" and not self._key and not self._is_doubled:
            self._is_doubled = True
            return Progress.MORE
        progress = self._scanner.take(char)
        if progress is Progress.DONE:
            return self._end()
        # Entries that are dropped may have anything inside.
        return self._take_entry(char, expected) if progress is Progress.MORE and depth == 1 else progress

    def _take_entry(self, char: str, expected: Expects) -> Progress:
        if expected in (Expects.KEY, Expects.KEY_OR_END) and char == '"':
            self._recorded = [char]
        elif expected is Expects.VALUE and self._key == "name" and not char.isspace():
            if char != '"' or self._name is not None:
                return Progress.BROKEN
            self._recorded = [char]
        elif self._recorded is not None:
            self._recorded.append(char)
            if self._scanner.expects in (Expects.COLON, Expects.COMMA_OR_END):
                return self._end_string("".join(self._recorded))
        return Progress.MORE

    def _begin_arguments(self, char: str) -> Progress:
        if self._arguments is not None or (self._is_plain and char != "{"):
            return Progress.BROKEN
        self._arguments, self._in_arguments = ArgumentsText(), True
        return self._take_in_arguments(char)

    def _end_string(self, text: str) -> Progress:
        self._recorded = None
        try:
            value = str(json.loads(text))
        except ValueError:  # a raw control character
            return Progress.BROKEN
        if self._is_plain and text != f'"{value}"':
            return Progress.BROKEN
        if self._scanner.expects is Expects.COLON:
            self._key = value
            return Progress.MORE if value in self._keys else Progress.BROKEN
        if value not in self._tools:
            return Progress.BROKEN
        self._name = value
        if self._arguments is not None:
            self._begin(value, self._arguments)
        return Progress.MORE

    @property
    def _keys(self) -> Sequence[str]:
        """Names of the entries that may come."""
        if not self._is_plain or self.has_begun:
            return ("name", *_ARGUMENTS, *_OTHERS)
        return ("name",) if self._name is None else _ARGUMENTS

    def _begin(self, name: str, arguments: ArgumentsText) -> None:
        self.has_begun = True
        self._framing.begin_call(name, arguments)

    def _end(self) -> Progress:
        """Ends the object. One without arguments becomes a call, unless calls need arguments."""
        self._is_ended = True
        if self._name is not None and not self.has_begun and not self._needs_arguments:
            self._begin(self._name, ArgumentsText())
        if not self.has_begun:
            return Progress.BROKEN
        return Progress.MORE if self._is_doubled else Progress.DONE

    def _take_second_brace(self, char: str) -> Progress:
        if char.isspace():
            return Progress.MORE
        return Progress.DONE if char == "}" else Progress.BROKEN
