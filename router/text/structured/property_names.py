"""Refuses schemas of objects in which an answer can get stuck: after a comma no property name may follow.

That happens where a pattern of `patternProperties` matches no name, or only names that `properties` lists already.
llguidance permits the comma all the same.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from router.text.structured.json_schema import Place, Schema, schemas_in, unsupported
from router.text.structured.output import StructuredOutput
from router.text.structured.references import joint_parts, listed
from twostroke.grammar.compiler import LIMITS

_JSON_RULE = re.compile(r"%json\s+(?=\{)")
_QUOTE = ord('"')
_NAMING = ("properties", "required")


def check_property_names(output: StructuredOutput) -> None:
    """Checks the schemas of an output. Raises UnsupportedSchema if patterns may leave no name after a comma."""
    patterns = _Patterns()
    for root in roots_of(output):
        schemas = list(schemas_in(root))
        if not any("patternProperties" in schema for _, schema in schemas):
            continue
        for place, parts in joint_schemas(schemas, root):
            given = dict.fromkeys(pattern for part in parts for pattern in _keys(part, "patternProperties"))
            named = dict.fromkeys(name for part in parts for key in _NAMING for name in _keys(part, key))
            if given and (problem := patterns.problem(tuple(given), tuple(named))):
                raise unsupported("patternProperties", place, output.field, f" {problem}")


def _keys(schema: Schema, keyword: str) -> list[str]:
    names = schema.get(keyword)
    return [name for name in names if isinstance(name, str)] if isinstance(names, dict | list) else []


def roots_of(output: StructuredOutput) -> Iterator[Any]:
    """Yields the JSON schemas in an output: the whole of it, or those in the rules of its grammar."""
    text = output.body.decode()
    if output.kind == "json":
        yield json.loads(text)
    elif output.kind in ("llguidance", "grammar"):
        for rule in _JSON_RULE.finditer(text):
            try:
                yield json.JSONDecoder().raw_decode(text, rule.end())[0]
            except ValueError:  # not a rule, or the compiler of the whole grammar reports it
                continue


class _Patterns:
    """Finds which names patterns match. Each pattern, and each set of patterns, is compiled once."""

    def __init__(self) -> None:
        self._tokenizer = LLTokenizer("byte")
        self._matchers: dict[tuple[str, ...], LLMatcher] = {}
        self._known: dict[tuple[tuple[str, ...], str], bool] = {}
        self._without_names: dict[str, bool] = {}

    def problem(self, patterns: tuple[str, ...], names: tuple[str, ...]) -> str | None:
        """Returns what is wrong with the patterns of an object that has properties of these names. None: nothing is."""
        for name in names:
            if self._match(patterns, name):
                return f"that matches the property {json.dumps(name)[:80]} too"
        return "that matches no name" if any(map(self._matches_no_name, patterns)) else None

    def _match(self, patterns: tuple[str, ...], name: str) -> bool:
        """Returns whether one of the patterns matches a name. An invalid pattern matches none, and is refused later."""
        if (patterns, name) in self._known:
            return self._known[patterns, name]
        if patterns not in self._matchers:
            strings = [{"type": "string", "pattern": pattern} for pattern in patterns]
            self._matchers[patterns] = self._matcher({"anyOf": strings})
        matcher = self._matchers[patterns].deep_copy()
        text = list(json.dumps(name, ensure_ascii=False).encode())
        is_match = not matcher.is_error() and matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        self._known[patterns, name] = is_match
        return is_match

    def _matches_no_name(self, pattern: str) -> bool:
        if pattern not in self._without_names:
            alone = {"patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
            matcher = self._matcher({"type": "object", **alone})
            matcher.consume_token(ord("{"))
            # After `{`, a name begins with a quote. If no quote may follow, no name matches.
            mask = matcher.compute_bitmask()
            self._without_names[pattern] = not (matcher.is_error() or bool(mask[_QUOTE // 8] >> _QUOTE % 8 & 1))
        return self._without_names[pattern]

    def _matcher(self, schema: Schema) -> LLMatcher:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)


MOST_PARTS = 10_000
"""Most schemas that are examined in one document. What further ones forbid together is not checked."""


def joint_schemas(schemas: Sequence[tuple[Place, Schema]], root: Any) -> Iterator[tuple[Place, list[Schema]]]:
    """Yields, for each schema of the document, all schemas that apply to the same value as it does.

    These are the ones that `allOf` and `$ref` lead to, and one option of each `anyOf` or `oneOf`, in each combination.
    Where several of them describe one property or the items of a list, these descriptions are yielded together, too.
    """
    # An entry: where it is, the schemas of the value, and the ids of the lists of options of which one was chosen.
    waiting = [(place, [schema], frozenset[int]()) for place, schema in reversed(schemas)]
    seen, left = set[tuple[frozenset[int], frozenset[int]]](), MOST_PARTS
    while waiting and left > 0:
        place, given, chosen = waiting.pop()
        together = itertools.islice(joint_parts(given, root), MOST_PARTS)
        parts = [part for part in together if isinstance(part, dict)]
        left -= len(parts)
        if (key := (frozenset(map(id, parts)), chosen)) in seen:
            continue
        seen.add(key)
        yield place, parts
        waiting += [(place, [*parts, option], chosen | {id(options)}) for options, option in _options(parts, chosen)]
        waiting += [(place, each, chosen) for each in _inner_descriptions(parts) if len(each) > 1]


def _options(parts: Sequence[Schema], chosen: Collection[int]) -> Iterator[tuple[list[Any], Schema]]:
    """Yields the options of each list from which none was chosen yet, with the list."""
    for part in parts:
        for key in ("anyOf", "oneOf"):
            options = listed(part, key)
            if id(options) not in chosen:
                yield from ((options, option) for option in options if isinstance(option, dict))


def _inner_descriptions(parts: Sequence[Schema]) -> Iterator[list[Schema]]:
    """Yields the descriptions that the parts have of one property, for each property that they name, and of items."""
    described = [part["properties"] for part in parts if isinstance(part.get("properties"), dict)]
    for name in dict.fromkeys(name for each in described for name in each):
        yield [each[name] for each in described if isinstance(each.get(name), dict)]
    yield [part["items"] for part in parts if isinstance(part.get("items"), dict)]
