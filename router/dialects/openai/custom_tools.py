"""Custom tools: the model sees a function with one text, `input`, and the client gets only that text.

Chat completions and /v1/responses write them differently. What both have in common is here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from router.dialects.reply import Json
from router.text.structured.sources import check_regex
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest

CUSTOM_INPUT = "input"
"""Name of the only argument of the function that stands for a custom tool."""

SYNTAXES = ("lark", "regex")
"""Syntaxes of a grammar that OpenAI's API knows."""

_OPENING = re.compile(r'\s*\{\s*"' + CUSTOM_INPUT + r'"\s*:\s*"')
_LONGEST_OPENING = 256
"""Most characters of the arguments before the input's text, blanks included. If there are more, the input is only read
once the arguments are whole."""
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = r"\\u[dD][89abAB]", r"\\u[dD][c-fC-F]"
_PAIR = f"{_HIGH}{_HEX}{{2}}{_LOW}{_HEX}{{2}}"
_CERTAIN = re.compile(
    rf'(?:[^"\\]|\\[^u]|{_PAIR}|(?!{_HIGH})\\u{_HEX}{{4}}|\\u{_HEX}{{0,3}}(?=[^0-9a-fA-F])'
    # Half of a surrogate pair, once it is certain that the other half does not follow.
    rf"|{_HIGH}{_HEX}{{2}}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]|{_LOW}{_HEX}?[^0-9a-fA-F]))*"
)
"""Characters of a string in JSON whose meaning no later character changes."""
_ESCAPE = re.compile(rf"{_PAIR}|\\u{_HEX}{{4}}|\\[^u]")


def checked_grammar(grammar: Any, name: str) -> Json:
    """Returns the syntax and the definition of an input's grammar. Raises InvalidRequest, naming the field."""
    given = grammar if isinstance(grammar, dict) else {}
    syntax, definition = given.get("syntax"), given.get("definition")
    if syntax not in SYNTAXES or not isinstance(definition, str) or not definition:
        raise InvalidRequest(f"{name} must have a syntax, {' or '.join(SYNTAXES)}, and a definition", field=name)
    if syntax == "regex":
        check_regex(definition, f"{name}.definition")
    return {"syntax": syntax, "definition": definition}


def check_names(custom_names: Collection[str], function_names: Iterable[Any]) -> None:
    """Checks that no function has the name of a custom tool: a call would not say which is meant."""
    for name in function_names:
        if name in custom_names:
            raise InvalidRequest(f"tools: {shown(name)} is the name of a function and of a custom tool", field="tools")


def custom_function(name: str, description: str | None, grammar: Json | None) -> Json:
    """Returns the function that stands for a custom tool, as chat completions write it.

    The grammar becomes part of the description, which the model reads. A regex also constrains the answer. A Lark
    grammar does not: it cannot be turned into a grammar for the inside of a JSON string.
    """
    text: Json = {"type": "string"}
    told = [] if not description else [description]
    if grammar is not None:
        told.append(f"The input must match this {grammar['syntax']} grammar:\n{grammar['definition']}")
        if grammar["syntax"] == "regex":
            text["pattern"] = f"^(?:{grammar['definition']})$"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    described = {"description": "\n".join(told)} if told else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def keeps_inputs(functions: Sequence[Mapping[str, Any]], custom_names: Collection[str]) -> bool:
    """Returns whether the input of any custom tool is constrained by a regex."""
    named = (tool["function"] for tool in functions if tool["function"]["name"] in custom_names)
    return any("pattern" in function["parameters"]["properties"][CUSTOM_INPUT] for function in named)


class CustomInput:
    """The input of one call, read from the arguments that the model writes piece by piece.

    If the arguments begin with the text `input`, the input is this text, even if it is cut. Other arguments are read
    once they are whole: the input is their field `input`, or else all of their text. What `feed` and `end` return,
    joined, does not depend on how the arguments were split into pieces.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        """Arguments up to the piece in which the input's text begins."""
        self._chars = 0
        self._rest = ""
        """Characters of the text that later ones may change."""
        self._is_open = self._is_over = False

    def feed(self, arguments: str) -> str:
        """Returns the characters of the input that have become certain with these arguments."""
        if self._is_open:
            return self._read(arguments)
        self._pieces.append(arguments)
        has_room, self._chars = self._chars < _LONGEST_OPENING, self._chars + len(arguments)
        begun = "".join(self._pieces) if has_room else ""
        opening = _OPENING.match(begun, 0, _LONGEST_OPENING)
        if opening is None:
            return ""
        self._is_open = True
        return self._read(begun[opening.end() :])

    def end(self) -> str:
        """Returns the rest of the input, at the end of the arguments. An escape that was cut is left out."""
        if self._is_open:
            return ""
        written = "".join(self._pieces)
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError):
            return written
        text = arguments.get(CUSTOM_INPUT) if isinstance(arguments, dict) else None
        return _writable(text) if isinstance(text, str) else written

    def _read(self, piece: str) -> str:
        if self._is_over:
            return ""
        held = self._rest + piece
        certain = _CERTAIN.match(held)
        assert certain is not None
        self._rest = held[certain.end() :]
        self._is_over = self._rest.startswith('"')
        return _ESCAPE.sub(_meaning, certain[0])


def custom_input(arguments: str) -> str:
    """Returns the input of a call whose arguments are whole."""
    text = CustomInput()
    return text.feed(arguments) + text.end()


def _meaning(escape: re.Match[str]) -> str:
    """Returns the character that an escape stands for, or itself where it stands for none."""
    try:
        return _writable(str(json.loads(f'"{escape[0]}"')))
    except ValueError:
        return escape[0]


def _writable(text: str) -> str:
    """Returns the text with unpaired surrogates replaced: UTF-8 cannot encode them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
