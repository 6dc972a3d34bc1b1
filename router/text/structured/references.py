"""Reads JSON schemas: what references lead to, which parts apply together, which values are equal. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any


def is_named(reference: Any) -> bool:
    """Returns whether a reference names an id, an anchor or another document, and no place in its own."""
    return isinstance(reference, str) and reference != "#" and not reference.startswith("#/")


def schema_at(root: Any, reference: Any) -> Any:
    """Returns what a reference within the document leads to.

    None where it leads nowhere, which llguidance refuses, and where it names an id or an anchor.
    """
    if not isinstance(reference, str) or is_named(reference):
        return None
    value = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and (index := _INDEX.fullmatch(name)) and int(index[1]) < len(value):
            value = value[int(index[1])]
        else:
            return None
    return value


_INDEX = re.compile(r"\+?0*([0-9]{1,9})")
"""A place in a list, as llguidance reads it. Python refuses to read numbers of thousands of digits."""


def listed(schema: Any, keyword: str) -> list[Any]:
    """Returns the schemas that a keyword lists; none where it is missing or no list."""
    options = schema.get(keyword) if isinstance(schema, dict) else None
    return options if isinstance(options, list) else []


def joint_parts(given: Iterable[Any], root: Any) -> Iterator[Any]:
    """Yields what a value must match if it matches all of `given`: these, and what `allOf` and `$ref` lead to."""
    waiting, seen = list(given), set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += listed(part, "allOf")
        if isinstance(part, dict) and "$ref" in part:
            waiting.append(schema_at(root, part["$ref"]))


def type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def canonical(value: Any) -> str:
    """Returns the same text for values that are equal in JSON, where 1 and 1.0 are."""
    if isinstance(value, list | dict):
        # The JSON parser does the recursion: it goes more than twice as deep as a recursive Python function can.
        value = json.loads(json.dumps(value), parse_float=lambda literal: _plain(float(literal)))
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
