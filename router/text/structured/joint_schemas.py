"""Which schemas of a document apply to one value together: llguidance keeps to all of them as to one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from router.text.structured.references import schema_at

if TYPE_CHECKING:
    from router.text.structured.json_schema import Place, Schema

MOST_PARTS = 10_000
"""Parts that are looked at in one document; what applies together beyond is not known."""


def joint_schemas(schemas: Sequence[tuple[Place, Schema]], root: Any) -> Iterator[tuple[Place, list[Schema]]]:
    """Gives each schema with those that apply to its values through `allOf` and `$ref`, and one of each `anyOf`.

    Also what several parts say together of a property, or of a list's items. `schemas`: all of the document.
    """
    waiting = [(place, [schema], frozenset[int]()) for place, schema in reversed(schemas)]
    seen, left = set[tuple[frozenset[int], frozenset[int]]](), MOST_PARTS
    while waiting and left > 0:
        place, given, chosen = waiting.pop()
        parts = _with_all_parts(given, root)
        left -= len(parts)
        if (key := (frozenset(map(id, parts)), chosen)) in seen:
            continue
        seen.add(key)
        yield place, parts
        waiting += [(place, [*parts, option], chosen | {id(options)}) for options, option in _options(parts, chosen)]
        waiting += [(place, each, chosen) for each in _of_values_inside(parts) if len(each) > 1]


def _with_all_parts(given: Sequence[Any], root: Any) -> list[Schema]:
    waiting, found, seen = list(given), list[Any](), set[int]()
    while waiting and len(found) < MOST_PARTS:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        if isinstance(part.get("allOf"), list):
            waiting += part["allOf"]
        if "$ref" in part:
            waiting.append(schema_at(root, part["$ref"]))
    return found


def _options(parts: Sequence[Schema], chosen: Collection[int]) -> Iterator[tuple[list[Any], Schema]]:
    """Gives the alternatives of each list that none is chosen of yet, with the list."""
    for part in parts:
        for key in ("anyOf", "oneOf"):
            options = part.get(key)
            if isinstance(options, list) and id(options) not in chosen:
                yield from ((options, option) for option in options if isinstance(option, dict))


def _of_values_inside(parts: Sequence[Schema]) -> Iterator[list[Schema]]:
    """Gives what the parts together say of each property that they name, and of items."""
    described = [part["properties"] for part in parts if isinstance(part.get("properties"), dict)]
    for name in dict.fromkeys(name for each in described for name in each):
        yield [each[name] for each in described if isinstance(each.get(name), dict)]
    yield [part["items"] for part in parts if isinstance(part.get("items"), dict)]
