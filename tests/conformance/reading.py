"""Reads an answer with the parser of one format, and joins the parts as clients do."""

from __future__ import annotations

from collections.abc import Iterable

from router.text.output.output_formats import TOOLS_BY_NAME
from router.text.output.parts import OutputParser, Part, ReasoningPart, TextPart
from router.text.output.think import ThinkParser
from tests.conformance.make_tool_outputs import TOOLS


def parser_of(kind: str) -> OutputParser:
    if kind in ("think", "open_think"):
        return ThinkParser(is_open=kind == "open_think")
    return TOOLS_BY_NAME[kind].parser(TOOLS, lambda rank: f"call_{rank}")


def joined(parts: Iterable[Part]) -> list[list[str]]:
    """Joins adjoining pieces, as clients do, and checks that pieces of calls come in order."""
    whole: list[list[str]] = []
    calls = 0
    for part in parts:
        if isinstance(part, TextPart | ReasoningPart):
            kind = "text" if isinstance(part, TextPart) else "reasoning"
            assert part.text
            if whole and whole[-1][0] == kind:
                whole[-1][1] += part.text
            else:
                whole.append([kind, part.text])
            continue
        if part.name:
            assert part.number == calls
            calls += 1
            whole.append(["call", part.name, ""])
        assert (part.number, part.call_id) == (calls - 1, f"call_{calls - 1}")
        assert whole[-1][0] == "call"
        whole[-1][2] += part.arguments
    return whole


def parsed(kind: str, pieces: Iterable[str], *, is_cut: bool = False) -> list[list[str]]:
    parser = parser_of(kind)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.flush(is_cut=is_cut)
    whole = joined(parts)
    assert parser.has_calls == any(part[0] == "call" for part in whole)
    return whole
