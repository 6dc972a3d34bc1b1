"""Text from outside, as it may stand in an error message or in a line of a log: short, on one line, and quoted.

A client chooses its model's name, its paths and its request ids. In full they make messages of megabytes. Written as
they are they can look like other fields, other lines, or run backwards on a terminal.
"""

from __future__ import annotations

MOST_SHOWN = 80
"""Characters of a client's text in an error message."""
MOST_VALUE = 1000
"""Characters of one value in a line of a log."""
UNQUOTED = frozenset('"=\\')
"""Printable characters that no value has without quotes. Whitespace is the other reason for quotes."""
ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


def shown(text: str) -> str:
    """Returns a text quoted as Python does it, and cut, for an error message that says what a client sent."""
    if len(text) <= MOST_SHOWN:
        return repr(text)
    return f"{text[:MOST_SHOWN]!r}... ({len(text)} characters)"


def without_middle(text: str, most: int) -> str:
    """Returns the begin and the end of a text of more than `most` characters, and how many are left out."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    half = most // 2
    return f"{text[:half]} ... ({left_out} characters left out) ... {text[len(text) - half :]}"


def on_one_line(text: str) -> str:
    """Returns a text on one line: control characters, line ends and changes of its direction are escapes."""
    return text if text.isprintable() else "".join(map(_printable, text))


def log_value(text: str) -> str:
    """Returns what stands after `key=` in a log: in quotes with escapes, unless it cannot be misread."""
    if len(text) > MOST_VALUE:
        text = without_middle(text, MOST_VALUE)
    if text and text.isprintable() and " " not in text and UNQUOTED.isdisjoint(text):
        return text
    return f'"{"".join(map(_within_quotes, text))}"'


def _within_quotes(character: str) -> str:
    return ESCAPES.get(character) or _printable(character)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
