"""Marks in grammars of answers: the texts that frame calls and reasoning, some of which are tokens of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Writes marks as terms of a grammar.

    A mark with a token of its own may be spelled in ordinary tokens, too. A model that never learned the token spells
    it, and parsers see only text: a spelled call has to keep to the same grammar.
    """

    added_token: Callable[[str], int | None]
    """Returns the token of a text that has one of its own."""

    def is_token(self, text: str) -> bool:
        return self.added_token(text) is not None

    def term(self, text: str) -> str:
        token = self.added_token(text)
        return quoted(text) if token is None else f"(<[{token}]> | {quoted(text)})"

    def after_text(self, text: str) -> str:
        """Returns the expression of any text up to and with the mark; it needs the rule `TEXT`, and `lazy_rule`."""
        token = self.added_token(text)
        return _lazy_name(text) if token is None else f"({_lazy_name(text)} | TEXT <[{token}]>)"

    @staticmethod
    def lazy_rule(text: str) -> str:
        """Returns the rule of text that ends where the mark is spelled first."""
        return f"{_lazy_name(text)}[lazy]: TEXT {quoted(text)}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lazy_name(text: str) -> str:
    return "up_to_" + "".join(char if char.isascii() and char.isalnum() else "_" for char in text).lower()
