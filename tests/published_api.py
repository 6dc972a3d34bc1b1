"""OpenAI's published API description, where it lies beside the checkout: do bodies and events match it?

The description is OpenAPI, whose schemas are JSON Schema but for `nullable` and `discriminator`. It is large and
somebody else's, so that it is read from `../shared/specs` (github.com/openai/openai-openapi, MIT) and no part of the
project.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

Json = dict[str, Any]

_PLACE = Path("shared/specs/openai-openapi.yaml")
_SCHEMAS = "#/components/schemas/"

_NULL_USAGE = {"response.created", "response.in_progress", "response.failed"}
"""Events whose response has null as its usage in the description's own examples, against its schema."""


def published_description() -> Path | None:
    """Returns where the description lies: in a folder above the checkout."""
    checkout = Path(__file__).resolve().parent.parent
    return next((path for above in checkout.parents if (path := above / _PLACE).exists()), None)


class PublishedApi:
    def __init__(self, schemas: Json) -> None:
        self._schemas = {name: _json_schema(schema) for name, schema in schemas.items()}
        self._events = {
            kind: name
            for name in map(_name, schemas["ResponseStreamEvent"]["anyOf"])
            for kind in schemas[name]["properties"]["type"]["enum"]
        }

    def check(self, schema: str, body: Any) -> None:
        """Raises AssertionError that says where `body` is not what the schema of that name says."""
        error = best_match(self._validator(schema).iter_errors(body))
        assert error is None, f"{schema}: {error.json_path}: {error.message}"

    def check_event(self, event: Json) -> None:
        """Checks one event of a response's stream."""
        assert event["type"] in self._events, f"no event has the type {event['type']}"
        if event["type"] in _NULL_USAGE:
            assert event["response"]["usage"] is None
            event = {**event, "response": {k: v for k, v in event["response"].items() if k != "usage"}}
        self.check(self._events[event["type"]], event)

    def properties(self, schema: str) -> set[str]:
        """Returns the names of an object's properties."""
        return set(self._properties(self._schemas[schema]))

    def _properties(self, schema: Json) -> Iterator[str]:
        yield from schema.get("properties", ())
        for part in (*schema.get("allOf", ()), *([schema] if "$ref" in schema else ())):
            yield from self._properties(self._schemas[_name(part)] if "$ref" in part else part)

    @functools.cache  # noqa: B019  # lives as long as the tests
    def _validator(self, schema: str) -> Draft202012Validator:
        return Draft202012Validator({"$ref": _SCHEMAS + schema, "components": {"schemas": self._schemas}})


@functools.cache
def published_api(path: Path) -> PublishedApi:
    with path.open() as file:
        return PublishedApi(yaml.load(file, yaml.CSafeLoader)["components"]["schemas"])


def _name(reference: Json) -> str:
    return str(reference["$ref"]).removeprefix(_SCHEMAS)


def _json_schema(schema: Any) -> Any:
    """Returns a schema without OpenAPI's own words. One of several that a discriminator tells apart is any of them."""
    if isinstance(schema, list):
        return [_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: _json_schema(value) for name, value in schema.items() if name not in ("nullable", "discriminator")}
    if isinstance(own.get("oneOf"), list):
        own["anyOf"] = own.pop("oneOf")
    return {"anyOf": [own, {"type": "null"}]} if schema.get("nullable") is True else own
