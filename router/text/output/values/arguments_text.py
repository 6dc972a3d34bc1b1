"""The arguments of one call as JSON text, sent so that what was sent can always be completed to an object."""

from __future__ import annotations

from collections.abc import Callable

from router.text.output.values.json_scanner import Expects, JsonScanner, Progress, fixed

_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"'}
_HEX_ESCAPE_CHARS = 6
"""Characters of an escape with a code, such as the one of a quote: \\u0022."""
_CLOSING = {"{": "}", "[": "]"}
_IN_STRING = frozenset({Expects.STRING, Expects.ESCAPE, Expects.HEX})
_WHOLE = frozenset({Expects.COMMA_OR_END, Expects.KEY_OR_END, Expects.VALUE_OR_END})
"""Places after a whole value, or after an opening bracket: closing brackets complete the text there."""


class ArgumentsText:
    """Takes an object, the JSON text of one in a string, or null, which stands for no arguments.

    Names, numbers, words and escapes are held until they are whole: what is ready can be completed only by closing
    quotes and brackets.
    """

    def __init__(self) -> None:
        self.has_begun = False
        """Whether the object has begun."""
        self._scanner = JsonScanner()
        self._ready: list[str] = []
        self._pending: list[str] = []
        self._is_whole = False
        self._take: Callable[[str], Progress] = self._first
        self._unfinished = ""
        """Characters so far of an incomplete escape, or of the word null."""

    def take(self, char: str) -> Progress:
        """Takes the next character. Returns BROKEN if it cannot follow; then it is not part of the arguments."""
        return self._take(char)

    def write(self, text: str) -> None:
        """Takes JSON text that a parser has made, which is always valid."""
        if self._is_in_string and '"' not in text and "\\" not in text:
            self._ready.append(text)
            return
        for char in text:
            progress = self._take(char)
            assert progress is not Progress.BROKEN, text

    def pop_ready(self) -> str:
        """Returns what has become ready since the last call."""
        ready = "".join(self._ready)
        self._ready.clear()
        return ready

    def complete(self) -> str:
        """Completes the object. Returns the held text that is left out of it."""
        if self._is_whole:
            return ""
        scanner, self._is_whole = self._scanner, True
        if not self.has_begun:
            self._ready.append("{}")
            return ""
        if scanner.is_whole_number:
            self._release()
        rest = "".join(self._pending)
        self._pending.clear()
        quote = '"' if scanner.expects in _IN_STRING and not scanner.is_key else ""
        self._ready += [quote, *(_CLOSING[bracket] for bracket in reversed(scanner.stack))]
        return rest

    def cut(self) -> None:
        """Adds the held text to arguments that stay incomplete."""
        self._release()
        self._is_whole = True

    @property
    def _is_in_string(self) -> bool:
        """Whether the next character is inside a string value. Names do not count."""
        return self._scanner.expects is Expects.STRING and not self._scanner.is_key

    def _first(self, char: str) -> Progress:
        if char == "{":
            self._take = self._in_object
            return self._in_object(char)
        if char == '"':
            self._take = self._in_text
        elif char == "n":
            self._unfinished, self._take = char, self._in_null
        elif not char.isspace():
            return Progress.BROKEN
        return Progress.MORE

    def _in_null(self, char: str) -> Progress:
        self._unfinished += char
        if self._unfinished == "null":
            self.complete()
            return Progress.DONE
        return Progress.MORE if "null".startswith(self._unfinished) else Progress.BROKEN

    def _in_object(self, char: str) -> Progress:
        self.has_begun = True
        scanner, expected = self._scanner, self._scanner.expects
        if self._is_in_string and char not in '"\\':
            self._ready.append(fixed(char, expected))
            return Progress.MORE
        if char in _CLOSING.values() and "".join(self._pending).strip() == ",":
            self._drop_comma()
        progress = scanner.take(char)
        if progress is Progress.BROKEN:
            return progress
        if expected is Expects.NUMBER and scanner.expects is not Expects.NUMBER:
            self._release()
        self._pending.append(fixed(char, expected))
        if scanner.expects in _WHOLE or self._is_in_string:
            self._release()
        self._is_whole = progress is Progress.DONE
        return progress

    def _drop_comma(self) -> None:
        """Takes back a comma that no entry follows."""
        self._pending = [space for space in self._pending if space != ","]
        self._scanner.expects = Expects.COMMA_OR_END

    def _in_text(self, char: str) -> Progress:
        if self._unfinished:
            return self._in_escape(char)
        if char == "\\":
            self._unfinished = char
            return Progress.MORE
        if char != '"':
            return self._take_decoded(char)
        if not self.has_begun:
            self.complete()
        return Progress.DONE if self._is_whole else Progress.BROKEN

    def _in_escape(self, char: str) -> Progress:
        self._unfinished += char
        if self._unfinished.startswith("\\u"):
            if len(self._unfinished) > len("\\u") and char not in "0123456789abcdefABCDEF":
                return Progress.BROKEN
            if len(self._unfinished) < _HEX_ESCAPE_CHARS:
                return Progress.MORE
        elif char not in _ESCAPED:
            return Progress.BROKEN
        escape, self._unfinished = self._unfinished, ""
        for text in _unescaped(escape):
            if self._take_decoded(text) is Progress.BROKEN:
                return Progress.BROKEN
        return Progress.MORE

    def _take_decoded(self, char: str) -> Progress:
        """Takes one decoded character of an object that is itself in a string. Only whitespace may stand around it."""
        if char.isspace() and (self._is_whole or not self.has_begun):
            return Progress.MORE
        if self._is_whole or not (self.has_begun or char == "{"):
            return Progress.BROKEN
        progress = self._in_object(char)
        return Progress.MORE if progress is Progress.DONE else progress

    def _release(self) -> None:
        self._ready += self._pending
        self._pending.clear()


def _unescaped(escape: str) -> str:
    """Returns the character of an escape. Half of a surrogate pair stays an escape, of a string in the object."""
    if not escape.startswith("\\u"):
        return _ESCAPED[escape[1]]
    code = int(escape[2:], 16)
    return escape if 0xD800 <= code < 0xE000 else chr(code)
