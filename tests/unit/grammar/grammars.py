"""Grammars for tests, and states in them without a model."""

from __future__ import annotations

import json
from typing import Any

from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.request import Grammar


def regex(pattern: str) -> Grammar:
    return Grammar(f"%llguidance {{}}\nstart: /{pattern}/")


def lark(rules: str) -> Grammar:
    return Grammar(f"%llguidance {{}}\n{rules}")


def schema(content: dict[str, Any]) -> Grammar:
    return Grammar(json.dumps({"grammars": [{"json_schema": content}]}))


def byte_compiler(size: int = 256 + 2, ends: tuple[int, ...] = (256,)) -> GrammarCompiler:
    """A compiler whose tokens are bytes, as a paced model's are."""
    return GrammarCompiler(load_vocabulary("", size, ends))


def text_state(grammar: Grammar, text: str = "") -> GrammarState:
    """The state of an answer with this text; tokens are bytes, and 256 is its end."""
    return byte_compiler().state(grammar, list(text.encode()))
