"""Which JSON values the schema of a parameter admits. By it, formats without quotes tell strings from others. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from router.text.structured.references import canonical, listed, schema_at, type_of

TYPES = frozenset({"string", "null", "boolean", "integer", "number", "object", "array"})

MAX_DEPTH = 64
"""Schemas inside one another, or behind references; a deeper one admits anything."""


@dataclass(frozen=True, slots=True)
class Admitted:
    types: frozenset[str] = frozenset()
    """Types that admit any value."""
    literals: frozenset[str] = frozenset()
    """Further values, as JSON text."""

    @property
    def takes_text(self) -> bool:
        """Whether any text is admitted as a string."""
        return "string" in self.types

    @property
    def is_text(self) -> bool:
        """Whether nothing but strings is admitted."""
        return self.types <= {"string"} and all(each.startswith('"') for each in self.literals)

    def admits(self, value: Any) -> bool:
        return bool(_types_of(value) & self.types) or canonical(value) in self.literals

    def __or__(self, other: Admitted) -> Admitted:
        return Admitted(self.types | other.types, self.literals | other.literals)

    def __and__(self, other: Admitted) -> Admitted:
        alone = {each for each in self.literals if other.admits(json.loads(each))}
        alone |= {each for each in other.literals if self.admits(json.loads(each))}
        return Admitted(_numbers(self.types) & _numbers(other.types), frozenset(alone))


ANYTHING = Admitted(TYPES)


def _numbers(types: frozenset[str]) -> frozenset[str]:
    """Returns the types, with `integer` if `number` is one of them: integers are numbers."""
    return types | {"integer"} if "number" in types else types


def admitted_by(parameters: Mapping[str, Any], name: str) -> Admitted:
    """Returns what a tool's parameter may be, by the schema of all its arguments."""
    return _Reader(parameters).of_parameter(name)


class _Reader:
    """Reads each schema once, however often it is referred to. One that refers to itself admits anything."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, Admitted] = {}

    def of_parameter(self, name: str) -> Admitted:
        declared = list(self._declared(self._root, name, set()))  # kept alive, because schemas are known by their ids
        return _all(self._of(schema, 0) for schema in declared)

    def read(self, schema: Any) -> Admitted:
        return self._of(schema, 0)

    def _declared(self, schema: Any, name: str, seen: set[int]) -> Iterable[Any]:
        """Yields the schemas that a parameter must all match, from anywhere in the schema of the arguments."""
        if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > MAX_DEPTH:
            return
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif isinstance(schema.get("additionalProperties"), Mapping) and "patternProperties" not in schema:
            yield schema["additionalProperties"]
        if isinstance(reference := schema.get("$ref"), str):
            yield from self._declared(self.at(reference), name, seen)
        for each in listed(schema, "allOf"):
            yield from self._declared(each, name, seen)
        branches = [*listed(schema, "anyOf"), *listed(schema, "oneOf")]
        found = [list(self._declared(each, name, seen)) for each in branches]
        if any(found):
            yield {"anyOf": [{"allOf": each} for each in found if each]}

    def at(self, reference: str) -> Any:
        """Returns what a reference leads to; None for one that leads out of the schema, or to an anchor."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        found = schema_at(self._root, reference)
        return schema_at(self._root, unquote(reference)) if found is None else found

    def _of(self, schema: Any, depth: int) -> Admitted:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ANYTHING
        if id(schema) not in self._known:
            self._known[id(schema)] = ANYTHING  # what a reference to itself admits
            self._known[id(schema)] = _all(self._claims(schema, depth + 1))
        return self._known[id(schema)]

    def _claims(self, schema: Mapping[str, Any], depth: int) -> Iterable[Admitted]:
        """Yields what each keyword admits."""
        yield _typed(schema)
        if isinstance(reference := schema.get("$ref"), str):
            yield self._of(self.at(reference), depth)
        if isinstance(values := schema.get("enum"), list):
            yield Admitted(literals=frozenset(map(canonical, values)))
        if "const" in schema:
            yield Admitted(literals=frozenset({canonical(schema["const"])}))
        for keyword in ("anyOf", "oneOf"):
            if branches := listed(schema, keyword):
                yield _any(self._of(each, depth) for each in branches)
        for each in listed(schema, "allOf"):
            yield self._of(each, depth)


def _typed(schema: Mapping[str, Any]) -> Admitted:
    named = schema.get("type")
    types = frozenset(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)) & TYPES
    if not types:
        return ANYTHING
    return Admitted(types | {"null"} if schema.get("nullable") is True else types)


def _all(claims: Iterable[Admitted]) -> Admitted:
    return _joined(claims, ANYTHING, Admitted.__and__)


def _any(claims: Iterable[Admitted]) -> Admitted:
    return _joined(claims, Admitted(), Admitted.__or__)


def _joined(claims: Iterable[Admitted], start: Admitted, join: Callable[[Admitted, Admitted], Admitted]) -> Admitted:
    for claim in claims:
        start = join(start, claim)
    return start


def _types_of(value: Any) -> frozenset[str]:
    kind = type_of(value)
    return frozenset({"integer", "number"} if kind == "integer" else {kind})


def may_be_text(admitted: Admitted) -> bool:
    """Returns whether some string is admitted."""
    return admitted.takes_text or any(each.startswith('"') for each in admitted.literals)


def branches_of(parameters: Mapping[str, Any], schema: Any, types: frozenset[str]) -> list[Mapping[str, Any]]:
    """Returns a parameter's schema and those that it combines or refers to, as far as they admit one of these types."""
    reader, found, waiting = _Reader(parameters), list[Mapping[str, Any]](), [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping) or any(each is known for known in found):
            continue
        admitted = reader.read(each)
        if not (admitted.types & types or ("string" in types and may_be_text(admitted))):
            continue
        found.append(each)
        waiting += [branch for keyword in ("allOf", "anyOf", "oneOf") for branch in listed(each, keyword)]
        if isinstance(reference := each.get("$ref"), str):
            waiting.append(reader.at(reference))
    return found
