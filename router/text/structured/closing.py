"""Closes schemas that say nothing about further properties and items, so that answers end. Pure.

By the letter of JSON Schema an object without `additionalProperties` may have any further ones. A model invents more of
them until its answer is cut. So they are taken as forbidden where properties are named, as by OpenAI, Outlines and
xgrammar. Objects that name no properties stay open, and so do schemas that say which further ones are allowed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from router.text.structured.references import is_named, listed, schema_at

Schema = dict[str, Any]

MOST_PARTS = 50_000
"""Most parts that are examined. A part counts once for each schema that has it. With more, nothing is closed."""

_TOGETHER = ("allOf", "anyOf", "oneOf")
_UNEVEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf")
"""Keywords of a part that say which properties are evaluated, beside their names."""
_DECIDING = ("additionalProperties", "patternProperties", "const", "enum")
"""Keywords with which a part of a schema decides which further properties an object may have."""


def close(schemas: Iterable[Schema], root: Any) -> None:
    """Closes schemas of a document, in place. `schemas`: all that an instance may be checked with."""
    listed = list(schemas)
    closings = _Closings(root)
    for schema in listed:
        closings.note(schema)
    for schema in listed:
        closings.close(schema)


def replace_unevaluated(schema: Schema, root: Any) -> None:
    """Writes `unevaluatedProperties: false` as `additionalProperties: false`, in place, if that means the same.

    It does if all parts of the schema apply to every value. With alternatives, that depends on the value.
    """
    if schema.get("unevaluatedProperties") is not False or is_named(schema.get("$ref")):
        return
    parts = _Closings(root).below(schema)
    if any(not isinstance(part, dict) or any(key in part for key in _UNEVEN) for part in parts):
        return
    if any(listed(schema, key) for key in ("anyOf", "oneOf")) or (parts and "patternProperties" in schema):
        return
    del schema["unevaluatedProperties"]
    if "additionalProperties" not in schema:
        named = [part["properties"] for part in (schema, *parts) if isinstance(part.get("properties"), dict)]
        names = dict.fromkeys(name for properties in named for name in properties)
        if isinstance(own := schema.get("properties", {}), dict):  # else the compiler reports it
            schema["properties"] = {**dict.fromkeys(names, True), **own}
        schema["additionalProperties"] = False


class _Closings:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MOST_PARTS
        self._parts: set[int] = set()
        """Schemas that describe an object together with others: none of them may close it by itself."""

    def note(self, schema: Schema) -> None:
        if is_named(schema.get("$ref")):  # what it leads to may be part of anything
            self._left = 0
        if self._is_joint(schema):
            self._parts.update(id(part) for part in self.below(schema))
        for option in listed(schema, "oneOf"):  # closed, they might seem to exclude one another
            if isinstance(option, dict):
                self._parts.update((id(option), *(id(part) for part in self.below(option))))

    def close(self, schema: Schema) -> None:
        if id(schema) in self._parts or self._left <= 0:
            return
        if self._is_joint(schema):
            self._close_joint(schema)
        elif not any(key in schema for key in ("$ref", *_TOGETHER, "const", "enum")):
            _close_object(schema)
            _close_array(schema)

    def _is_joint(self, schema: Schema) -> bool:
        """Returns whether several schemas must match at once, each of which may name properties."""
        alone = ("properties" in schema) + ("$ref" in schema) + len(listed(schema, "allOf"))
        return alone + sum(bool(listed(schema, key)) for key in ("anyOf", "oneOf")) > 1

    def _close_joint(self, schema: Schema) -> None:
        """Closes a schema of several parts. An object may have the properties that any part names. If a part cannot be
        read, nothing is closed.
        """
        parts = [schema, *self.below(schema)]
        if any(not isinstance(part, dict) or any(key in part for key in _DECIDING) for part in parts):
            return
        if not any("properties" in part for part in parts):
            return
        names = dict.fromkeys(name for part in parts for name in _names(part))
        own = schema.get("properties")
        schema["properties"] = {**(own if isinstance(own, dict) else {})}
        for name in names:
            schema["properties"].setdefault(name, True)
        schema["additionalProperties"] = False

    def below(self, schema: Any) -> list[Any]:
        """Returns the schemas that are applied to the same value as a schema."""
        waiting, found, seen = collections.deque(self._applied(schema)), list[Any](), {id(schema)}
        while waiting and self._left > 0:
            part, self._left = waiting.popleft(), self._left - 1
            if id(part) in seen:
                continue
            seen.add(id(part))
            found.append(part)
            if isinstance(part, dict):
                waiting += self._applied(part)
        return found

    def _applied(self, schema: Any) -> Iterator[Any]:
        for key in _TOGETHER:
            yield from listed(schema, key)
        if isinstance(schema, dict) and "$ref" in schema:  # an alternative need not be a schema at all
            yield schema_at(self._root, schema["$ref"])


def _names(schema: Schema) -> Iterator[str]:
    if isinstance(schema.get("properties"), dict):
        yield from schema["properties"]
    if isinstance(schema.get("required"), list):
        yield from (name for name in schema["required"] if isinstance(name, str))


def _close_object(schema: Schema) -> None:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    has_patterns = isinstance(patterns, dict) and any(each is not False for each in patterns.values())
    if "additionalProperties" in schema or not (isinstance(properties, dict) or has_patterns):
        return
    names = dict.fromkeys(_names(schema))
    least = schema.get("minProperties", 0)
    if not has_patterns and isinstance(least, int) and least > len(names):
        return
    if not has_patterns and names:
        schema["properties"] = {**dict.fromkeys(names, True), **(properties or {})}
    schema["additionalProperties"] = False


def _close_array(schema: Schema) -> None:
    """Closes a list whose schema describes its first items: it may have no others."""
    for first, further in (("prefixItems", "items"), ("items", "additionalItems")):
        items, least = schema.get(first), schema.get("minItems", 0)
        if isinstance(items, list) and further not in schema and isinstance(least, int) and least <= len(items):
            schema[further] = False
            return
