"""Checks a JSON schema: every keyword of it is enforced, or refused by name. Pure.

llguidance refuses most keywords that it does not know. This module names their place, and also refuses what llguidance
would accept without enforcing it, so that no answer violates its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from router.text.structured.alternatives import Alternatives
from router.text.structured.closing import close, replace_unevaluated
from router.text.structured.emptiness import forbid_endless
from router.text.structured.references import schema_at
from twostroke.base.errors import UnsupportedFeature

Schema = dict[str, Any]

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"},
)
"""Formats of strings that llguidance enforces."""

_ONE = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("patternProperties", "properties")
"""Keywords whose values are objects of schemas; values in `_ONE` are schemas, and in `_LISTS` lists of schemas. All can
be enforced."""
_DEFINITIONS = ("$defs", "definitions")


class UnsupportedSchema(UnsupportedFeature):
    """A keyword of a schema is not supported."""

    keyword: str = ""


def _never(value: Any, schema: Schema) -> bool:
    return False


def _is_anything(value: Any, schema: Schema) -> bool:
    return value is True or value == {}


def _is_empty(value: Any, schema: Schema) -> bool:
    return not value


def _without(*keywords: str) -> Callable[[Any, Schema], bool]:
    return lambda value, schema: not any(keyword in schema for keyword in keywords)


def _is_reachable(least: Any, schema: Schema) -> bool:
    """Returns whether the required properties and one more are at least `least`.

    Further ones cannot be counted on: an answer may repeat the name of a property that is not required.
    """
    required = schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    return isinstance(least, int) and least <= named + 1


UNSUPPORTED: Mapping[str, Callable[[Any, Schema], bool]] = {
    "$dynamicRef": _never,
    "$recursiveRef": _never,
    "contains": _never,
    "dependencies": _is_empty,
    "dependentRequired": _is_empty,
    "dependentSchemas": _is_empty,
    "disallow": _never,
    "divisibleBy": _never,
    "else": _without("if"),
    "extends": _never,
    "if": _without("then", "else"),
    "maxContains": _without("contains"),
    "minContains": _without("contains"),
    "not": lambda value, schema: value is False,
    "propertyNames": _is_anything,
    "then": _without("if"),
    "unevaluatedItems": _is_anything,
    "unevaluatedProperties": _is_anything,
    "uniqueItems": lambda value, schema: value is False,
    "x-guidance": _never,
}
"""Keywords that cannot be enforced, each with a test whether it constrains nothing. `disallow`, `divisibleBy` and
`extends` are of early versions of the specification."""


_CONTROLS = "[\x00-\x07\x0b\x0e-\x1f\x7f]"
"""Control characters without a letter of their own after a backslash: strings of an answer cannot have them."""
_UNWRITABLE = re.compile(_CONTROLS)
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*+(?:\]|\\?\Z)", re.DOTALL)
"""A class, or one that nothing closes: to look for the end again from each bracket would take minutes."""
_UNWRITABLE_PATTERN = re.compile(
    rf"{_CONTROLS}|\\(?:x|x\{{0*|u00|u\{{0*)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF]|[0-7bBeEfF]\}})|\\[aev0]|\\c[A-Z]"
)
"""A control character in a pattern, or an escape that stands for one. A class may name some beside others."""


def checked_schema(schema: Any, field: str, *, is_strict: bool, is_open: bool = False) -> Any:
    """Returns the schema, changed in place: closed, and without unsupported keywords that constrain nothing.

    `is_strict`: unsupported formats are refused. Otherwise they are annotations, as in the specification. `is_open`:
    the schema is not closed, which is the letter of the specification. Raises UnsupportedSchema.
    """
    schemas = list(schemas_in(schema))
    forbid_endless(schema, (each for _, each in schemas))
    alternatives = Alternatives(schema)
    for _, each in schemas:
        replace_unevaluated(each, schema)
    for place, each in schemas:
        _check(each, place, field, is_strict)
    for _, each in schemas:
        alternatives.mark(each)
    if not is_open:
        close((each for _, each in schemas), schema)
    return schema


@dataclass(frozen=True, slots=True)
class Place:
    """A JSON pointer to a schema. Its text is only made for errors: each may be long, and there are many."""

    above: Place | None
    name: str
    """The pointer itself where nothing is above."""

    def __str__(self) -> str:
        names, place = list[str](), self
        while place.above is not None:
            names.append(_escaped(place.name))
            place = place.above
        return "/".join([place.name, *reversed(names)])


def _check(schema: Schema, place: Place, field: str, is_strict: bool) -> None:
    known = [keyword for keyword in schema if keyword in UNSUPPORTED]
    for keyword in known:
        if not UNSUPPORTED[keyword](schema[keyword], schema):
            raise unsupported(keyword, place, field)
    _check_characters(schema, place, field)
    if "minProperties" in schema and not _is_reachable(schema["minProperties"], schema):
        raise unsupported("minProperties", place, field, ", beyond the required properties and one more,")
    named = schema.get("format")
    is_known = isinstance(named, str) and named in FORMATS
    if named is not None and not is_known and _takes_strings(schema):
        if is_strict:
            raise unsupported("format", place, field, f" {json.dumps(named)[:80]}")
        del schema["format"]
    if "unevaluatedProperties" in known:
        schema.setdefault("additionalProperties", True)  # it says that there may be any
    for keyword in known:
        del schema[keyword]


def _check_characters(schema: Schema, place: Place, field: str) -> None:
    """Refuses characters that llguidance cannot write. It would leave them out, and so accept another text."""
    texts = [(keyword, text) for keyword in ("const", "enum") for text in _strings_in(schema.get(keyword))]
    patterns = [("pattern", schema.get("pattern"))]
    if isinstance(schema.get("patternProperties"), dict):
        patterns += [("patternProperties", name) for name in schema["patternProperties"]]
    refused = [keyword for keyword, text in texts if _UNWRITABLE.search(text)]
    refused += [
        keyword
        for keyword, pattern in patterns
        if isinstance(pattern, str) and _UNWRITABLE_PATTERN.search(_CLASS.sub("", pattern))
    ]
    if refused:
        raise unsupported(refused[0], place, field, " with control characters")


def _strings_in(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each


def _takes_strings(schema: Schema) -> bool:
    types = schema.get("type", "string")
    return "string" in (types if isinstance(types, list) else [types])


def unsupported(keyword: str, place: Place, field: str, what: str = "") -> UnsupportedSchema:
    """Returns the error for a keyword that is not supported."""
    error = UnsupportedSchema(f'{field}: "{keyword}"{what} at {place} is not supported', field=field)
    error.keyword = keyword
    return error


def schemas_in(root: Any) -> Iterator[tuple[Place, Schema]]:
    """Yields every schema that an instance may be checked with, and its place.

    Definitions that nothing refers to are left out, unless something refers by an id or an anchor.
    """
    waiting: list[tuple[Place, Any]] = [(Place(None, "#"), root)]
    seen: set[int] = set()
    definitions = _definitions(root)  # yielded at most once, however many references there are
    while waiting:
        place, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        waiting.extend(reversed([*_parts(schema, place), *_referred(schema, root, definitions)]))
        yield place, schema


def _parts(schema: Schema, place: Place) -> Iterator[tuple[Place, Any]]:
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict):
            yield Place(place, keyword), schema[keyword]
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            above = Place(place, keyword)
            yield from ((Place(above, str(index)), each) for index, each in enumerate(schema[keyword]))
    for keyword in _NAMED:
        yield from _named(schema.get(keyword), Place(place, keyword))


def _named(schemas: Any, above: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(schemas, dict):
        yield from ((Place(above, name), each) for name, each in schemas.items())


def _referred(schema: Schema, root: Any, definitions: Iterator[tuple[Place, Any]]) -> Iterator[tuple[Place, Any]]:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return
    if reference == "#" or reference.startswith("#/"):
        yield Place(None, reference), schema_at(root, reference)
    else:
        yield from definitions


def _definitions(root: Any) -> Iterator[tuple[Place, Any]]:
    for keyword in _DEFINITIONS:
        if isinstance(root, dict):
            yield from _named(root.get(keyword), Place(Place(None, "#"), keyword))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
