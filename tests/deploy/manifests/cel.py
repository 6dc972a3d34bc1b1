"""Rules that CRDs carry (x-kubernetes-validations), evaluated over objects completed with the schema's defaults."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import celpy

from tests.deploy.manifests.objects import Complaint, Object, where
from tests.deploy.manifests.schemas import is_custom, schema_of, with_defaults


def custom_rules_hold(item: Object) -> Iterator[Complaint]:
    schema = schema_of(item) if is_custom(item) else None
    if schema is not None:
        for path, value, rule in _rules_met(schema, with_defaults(item), ""):
            wrong = _judge(rule, value)
            if wrong is not None:
                yield Complaint(where(item), path, wrong, f"make it true: {' '.join(rule['rule'].split())[:160]}")


def rules() -> list[str]:
    """All that can be met at all; a test parses each."""
    from tests.deploy.manifests.schemas import _crds

    return sorted({rule["rule"] for schema in _crds().values() for rule in _all_rules(schema)})


def _all_rules(schema: Object) -> Iterator[Object]:
    yield from schema.get("x-kubernetes-validations") or []
    inner = [*(schema.get("properties") or {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for below in inner:
        if isinstance(below, dict):
            yield from _all_rules(below)


def _rules_met(schema: Object, value: Any, path: str) -> Iterator[tuple[str, Any, Object]]:
    for rule in schema.get("x-kubernetes-validations") or []:
        if "oldSelf" not in rule["rule"]:  # of changes: nothing is changed here
            yield path, value, rule
    if isinstance(value, dict):
        for key, inner in value.items():
            below = (schema.get("properties") or {}).get(key) or schema.get("additionalProperties")
            if isinstance(below, dict):
                yield from _rules_met(below, inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, inner in enumerate(value):
            yield from _rules_met(schema["items"], inner, f"{path}[{index}]")


def _judge(rule: Object, value: Any) -> str | None:
    """None where it holds."""
    try:
        held = program(rule["rule"]).evaluate({"self": celpy.json_to_cel(value)})
    except celpy.CELEvalError as error:
        what = rule.get("message") or f"the rule cannot be evaluated ({str(error)[:120]})"
        return f"{what} (something that it asks for is missing)"
    return None if held else str(rule.get("message") or rule["rule"])


@functools.cache
def program(rule: str) -> Any:
    environment = _environment()
    return environment.program(environment.compile(rule))


@functools.cache
def _environment() -> celpy.Environment:
    return celpy.Environment()
