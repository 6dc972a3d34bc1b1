"""Finds schemas that no finite value matches, since each value would have to hold another one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from router.text.structured.references import schema_at

Schema = dict[str, Any]

MOST_PASSES = 50
"""Most passes over all schemas of a document. Each pass may use what the pass before it found."""

_INSIDE = ("additionalItems", "additionalProperties", "items", "allOf", "anyOf", "oneOf", "prefixItems",
           "patternProperties", "properties")  # fmt: skip
"""Keywords whose values are schemas, or lists or objects of schemas."""


def is_endless(root: Any, schemas: Iterable[Schema]) -> bool:
    """Returns whether it is known that no value of finite length matches. `schemas`: all of the document."""
    return any(schema is root for schema in _endless(root, list(schemas)))


def forbid_endless(root: Any, schemas: Iterable[Schema]) -> None:
    """Writes `false`, in place, for schemas that no finite value matches: an answer that has begun one never ends."""
    listed = list(schemas)
    if not (endless := {id(schema) for schema in _endless(root, listed)}):
        return
    for schema in listed:
        for keyword in _INSIDE:
            inside = schema.get(keyword)
            if id(inside) in endless:
                schema[keyword] = False
            elif isinstance(inside, list):
                schema[keyword] = [False if id(each) in endless else each for each in inside]
            elif isinstance(inside, dict) and keyword in ("patternProperties", "properties"):
                schema[keyword] = {name: False if id(each) in endless else each for name, each in inside.items()}


def _endless(root: Any, listed: Sequence[Schema]) -> list[Schema]:
    waiting, finite = list(reversed(listed)), set[int]()
    for _ in range(MOST_PASSES):
        found = {id(schema) for schema in waiting if _is_finite(schema, root, finite)}
        if not found:
            return waiting
        finite |= found
        waiting = [schema for schema in waiting if id(schema) not in found]
    return []


def _is_finite(schema: Schema, root: Any, finite: set[int]) -> bool:
    """Returns whether some value may match, given the schemas that are known to have one."""

    def can(part: Any) -> bool:
        return part is not False and (not isinstance(part, dict) or id(part) in finite)

    for key, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(schema.get(key), list) and not enough(can(part) for part in schema[key]):
            return False
    if "$ref" in schema and not can(schema_at(root, schema["$ref"])):
        return False
    types = schema.get("type")
    names = {types} if isinstance(types, str) else set(map(str, types)) if isinstance(types, list) else {"null"}
    if names - {"object", "array"}:
        return True
    properties, required = schema.get("properties"), schema.get("required")
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    described = properties if isinstance(properties, dict) else {}
    if "object" in names and all(can(described.get(name)) for name in needed):
        return True
    items = schema.get("items")
    return "array" in names and (not schema.get("minItems") or "prefixItems" in schema or can(items))
