"""Schemas, patterns and grammars that somebody wrote to hold up a server."""

from __future__ import annotations

import json
from typing import Any

from router.text.structured.output import StructuredOutput

_DOUBLING = "".join(f"R{rank}: R{rank + 1} R{rank + 1}\n" for rank in range(40))
EXTREME: dict[str, tuple[str, Any]] = {
    "deep": ("json", '{"items":' * 5000 + "{}" + "}" * 5000),
    "wide": ("json", {"type": "object", "properties": {f"p{i}": {} for i in range(12_000)}}),
    "an enormous enum": ("json", {"enum": [f"item {i}" for i in range(50_000)]}),
    "a long constant": ("json", {"const": "x" * 900_000}),
    "a cycle of references": ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "patterns at once": ("json", {"type": "string", "allOf": [{"pattern": f"a.*{chr(98 + i)}"} for i in range(20)]}),
    "catastrophic regex": ("regex", "((a*)*|.*b.{400})*c"),
    "nested repeats": ("regex", "(((.{1,500}x){1,500}y){1,500}z){1,500}"),
    "a long regex": ("regex", "ab" * 400_000),
    "parentheses": ("regex", "(" * 100_000 + ")" * 100_000),
    "a grammar that doubles": ("grammar", "start: R0\n" + _DOUBLING + 'R40: "x"'),
    "substrings": ("grammar", 'start: %regex {"substring_chars":"' + "abcd" * 200_000 + '"}'),
}  # fmt: skip
"""Kind and body of each, by what is extreme about it."""
HOSTILE = "start: s\ns: s s s | s s | /[ -~]/"
"""A grammar that compiles at once, and whose masks take longer with every token: each text has many readings."""


def extreme_outputs() -> list[StructuredOutput]:
    return [output_of(*each) for each in EXTREME.values()]


def output_of(kind: str, body: Any) -> StructuredOutput:
    return StructuredOutput(kind, (body if isinstance(body, str) else json.dumps(body)).encode(), "field")
