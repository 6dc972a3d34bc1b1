"""Custom tools: the model sees a function with one text, `input`, and the client gets only that text.

Chat completions and /v1/responses write them in forms of their own; what they mean is here.
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
"""Name of the one argument that a custom tool has as a function."""

SYNTAXES = ("lark", "regex")
"""Syntaxes of a grammar that OpenAI's API knows."""

_OPENING = re.compile(r'\s*\{\s*"' + CUSTOM_INPUT + r'"\s*:\s*"')
_LONGEST_OPENING = 256
"""Characters within which arguments have begun the text, blanks included. Others are not text until they are whole."""
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = r"\\u[dD][89abAB]", r"\\u[dD][c-fC-F]"
_PAIR = f"{_HIGH}{_HEX}{{2}}{_LOW}{_HEX}{{2}}"
_CERTAIN = re.compile(
    rf'(?:[^"\\]|\\[^u]|{_PAIR}|(?!{_HIGH})\\u{_HEX}{{4}}|\\u{_HEX}{{0,3}}(?=[^0-9a-fA-F])'
    # Half of a pair, once what follows is sure not to be the other half.
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
    """Raises InvalidRequest for a name that stands for two tools: no call of it would say which is meant."""
    for name in function_names:
        if name in custom_names:
            raise InvalidRequest(f"tools: {shown(name)} is the name of a function and of a custom tool", field="tools")


def custom_function(name: str, description: str | None, grammar: Json | None) -> Json:
    """Returns the function, as chat completions write it.

    The description tells the model of the grammar. Answers are kept to a regex; no grammar of the inside of a JSON
    string can be made of one in Lark.
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
    """Returns whether inputs of custom tools are to be kept to a grammar."""
    named = (tool["function"] for tool in functions if tool["function"]["name"] in custom_names)
    return any("pattern" in function["parameters"]["properties"][CUSTOM_INPUT] for function in named)


class CustomInput:
    """The input of one call, of the arguments that the model writes piece by piece.

    It is what stands under `input`, up to where the arguments end or are cut. Arguments that do not begin with that
    text are the input as they are, unless they are an object with it further on. What `feed` and `end` return, joined,
    does not depend on where the pieces ended.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        """Arguments in which the text has not begun."""
        self._chars = 0
        self._rest = ""
        """Characters of the text that later ones may change."""
        self._is_open = self._is_over = False

    def feed(self, arguments: str) -> str:
        """Returns what is certain of the input now."""
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
        """Returns the rest, at the end of the arguments. An escape that was cut is left out."""
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
    """Returns the text without halves of surrogate pairs, which no UTF-8 has."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
