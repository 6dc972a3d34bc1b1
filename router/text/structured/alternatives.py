"""Turns `oneOf` into `anyOf`, which llguidance enforces, if its alternatives exclude one another. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.text.structured.references import canonical, joint_parts, type_of

MOST_COMPARED = 20_000
"""Most schemas, values and pairs that are examined in one document. Alternatives after these are not known to exclude
one another."""
MOST_DEPTH = 8
"""Schemas within schemas that are compared."""
_TYPES: Mapping[str, frozenset[str]] = {
    **{name: frozenset({name}) for name in ("array", "boolean", "integer", "null", "object", "string")},
    "number": frozenset({"integer", "number"}),
}
_BESIDE = ("$ref", "allOf", "const", "enum", "properties", "required", "type")
"""Keywords beside `oneOf` that tell alternatives apart."""
_ANY = frozenset().union(*_TYPES.values())


@dataclass(slots=True)
class _Facts:
    """What is known of every value that a schema accepts, apart from its alternatives."""

    types: frozenset[str] = _ANY
    values: frozenset[str] | None = None
    """All that the value may be, as canonical JSON. None: it is not said."""
    properties: dict[str, list[Any]] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    alternatives: list[Sequence[Any]] = field(default_factory=list)
    """Lists of schemas. One schema of each list accepts the value."""
    is_never: bool = False
    """Whether the schema accepts no value."""


@dataclass(frozen=True, slots=True)
class _Values:
    """The values that a `const` or an `enum` lists."""

    texts: frozenset[str]
    """Canonical JSON of each."""
    types: frozenset[str]


class Alternatives:
    """Compares schemas of one document. Each schema, and each list of values, is read once.

    What is known of a schema stays true when `mark` changes a schema: the new one permits the same or less.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MOST_COMPARED
        self._known: dict[int, tuple[Any, _Facts]] = {}
        """Facts by the id of their schema. It stands beside them, so that no other object gets its id."""
        self._values: dict[tuple[str, int], _Values] = {}
        """Values by their keyword and the id of what the document has there."""

    def mark(self, schema: dict[str, Any]) -> None:
        """Turns `oneOf` of a schema into `anyOf`, in place, if no value can match two of its alternatives.

        If the schema names a discriminator, the alternatives are made to require it.
        """
        options = schema.get("oneOf")
        if not isinstance(options, list):
            return
        if not self._exclude_one_another(options, schema):
            options = _with_discriminator(options, schema.get("discriminator"))
            if options is None or not self._exclude_one_another(options, schema):
                return
        del schema["oneOf"]
        if "anyOf" not in schema:
            schema["anyOf"] = options
        elif isinstance(schema.setdefault("allOf", []), list):
            schema["allOf"].append({"anyOf": options})

    def _exclude_one_another(self, options: Sequence[Any], schema: Mapping[str, Any]) -> bool:
        """Returns whether the alternatives exclude one another. What `schema` says besides them holds for
        each of them.
        """
        beside = {keyword: schema[keyword] for keyword in _BESIDE if keyword in schema}
        wholes = [{"allOf": [beside, option]} for option in options] if beside else options
        pairs = ((one, other) for index, one in enumerate(wholes) for other in wholes[:index])
        return all(self._are_disjoint(one, other, MOST_DEPTH) for one, other in pairs)

    def _are_disjoint(self, one: Any, other: Any, depth: int) -> bool:
        """Returns whether it is known that no value matches both."""
        self._left -= 1
        if depth == 0 or self._left < 0:
            return False
        first, second = self._facts(one), self._facts(other)
        if first.is_never or second.is_never or not first.types & second.types:
            return True
        if first.values is not None and second.values is not None and first.values.isdisjoint(second.values):
            return True
        if first.types & second.types == {"object"} and self._differ_in_a_property(first, second, depth):
            return True
        return any(
            all(self._are_disjoint(option, beside, depth - 1) for option in options)
            for facts, beside in ((first, other), (second, one))
            for options in facts.alternatives
        )

    def _differ_in_a_property(self, first: _Facts, second: _Facts, depth: int) -> bool:
        return any(
            self._are_disjoint(mine, theirs, depth - 1)
            for name in sorted(first.properties.keys() & second.properties.keys() & (first.required | second.required))
            for mine in first.properties[name]
            for theirs in second.properties[name]
        )

    def _facts(self, schema: Any) -> _Facts:
        if id(schema) not in self._known:
            self._known[id(schema)] = schema, self._read(schema)
        return self._known[id(schema)][1]

    def _read(self, schema: Any) -> _Facts:
        facts = _Facts()
        for part in joint_parts([schema], self._root):
            if self._left <= 0:
                break
            self._left -= 1
            if part is False:
                facts.is_never = True
            elif isinstance(part, dict):
                _add(facts, part)
                for keyword in ("const", "enum"):
                    self._add_values(facts, part, keyword)
        return facts

    def _add_values(self, facts: _Facts, schema: Mapping[str, Any], keyword: str) -> None:
        given = schema.get(keyword)
        if keyword not in schema or (keyword == "enum" and not isinstance(given, list)):
            return
        key = keyword, id(given)
        if key not in self._values:
            listed: list[Any] = given if keyword == "enum" and isinstance(given, list) else [given]
            self._left -= len(listed)
            self._values[key] = _Values(frozenset(map(canonical, listed)), frozenset(map(type_of, listed)))
        values = self._values[key]
        facts.values = values.texts if facts.values is None else facts.values & values.texts
        facts.types &= values.types


def _with_discriminator(options: Sequence[Any], discriminator: Any) -> list[Any] | None:
    """Returns the alternatives, each of which also requires the property that OpenAPI's `discriminator` names.

    None: it names none. An object without the property might match two alternatives.
    """
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    return [{"allOf": [option, {"required": [name]}]} for option in options] if isinstance(name, str) else None


def _add(facts: _Facts, schema: Mapping[str, Any]) -> None:
    facts.types &= _types_of(schema)
    if isinstance(schema.get("properties"), dict):
        for name, each in schema["properties"].items():
            facts.properties.setdefault(name, []).append(each)
    if isinstance(schema.get("required"), list):
        facts.required |= {name for name in schema["required"] if isinstance(name, str)}
    facts.alternatives += [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]


def _types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        return _ANY
    return frozenset().union(*(_TYPES[name] for name in names))
