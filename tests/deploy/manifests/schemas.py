"""Shapes: native kinds by the API's own schemas, custom kinds by their CRDs. Fields that are not there are refused.

Metadata of custom objects is checked by the native schema of ObjectMeta. RayCluster's CRD has the whole schema of a
pod's spec; what a Pod must be beyond that, the other checks ask of all pod templates alike.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from referencing import Registry, Resource

from tests.deploy.manifests.objects import Complaint, Object, where

KUBERNETES = "1.36"
"""The version that the manifests were tried on (deploy/README.md)."""
CRDS = Path(__file__).parents[1] / "crds"
_WITHOUT_CRD = frozenset(("cert-manager.io/v1", kind) for kind in ("Certificate", "ClusterIssuer", "Issuer"))
"""Kinds that are looked at without one (certificates.py)."""
_LONGEST_FILE = 255
_STRUCTURE = ("apiVersion", "kind", "metadata")


def fits(value: object, bits: int) -> bool:
    return not isinstance(value, int) or -(1 << (bits - 1)) <= value < 1 << (bits - 1)


FORMATS = jsonschema.FormatChecker(formats=())
"""Numbers that do not fit are refused as they are read."""
for _bits in (32, 64):
    FORMATS.checks(f"int{_bits}")(functools.partial(fits, bits=_bits))


def native_schema_holds(item: Object) -> Iterator[Complaint]:
    if is_custom(item) or (item.get("apiVersion"), item.get("kind")) in _WITHOUT_CRD:
        return
    validator = _native_validator(str(item.get("apiVersion")), str(item.get("kind")))
    if validator is None:
        kind, version = item.get("kind"), item.get("apiVersion")
        todo = "correct apiVersion or kind, or add its CRD to tests/deploy/crds"
        yield Complaint(where(item), "apiVersion", f"no API server knows {kind} of {version}", todo)
        return
    yield from _complaints(validator, item, where(item), "")


def custom_schema_holds(item: Object) -> Iterator[Complaint]:
    if not is_custom(item):
        return
    schema = schema_of(item)
    if schema is None:
        group, _, version = str(item["apiVersion"]).rpartition("/")
        known = ", ".join(sorted(version for version, kind in _crds() if kind == item["kind"])) or "none"
        what = f"version {version} of {group} {item['kind']} is not served"
        yield Complaint(where(item), "apiVersion", what, f"use one of: {known}")
        return
    yield from _unknown_fields(schema, item, "", where(item), root=True)
    yield from _complaints(
        jsonschema.Draft4Validator(schema, format_checker=FORMATS), with_defaults(item), where(item), ""
    )
    yield from _repeated_keys(schema, item, "", where(item))
    metadata = _native_validator("meta/v1", "ObjectMeta")
    if metadata is not None:
        yield from _complaints(metadata, item.get("metadata"), where(item), "metadata")


def is_custom(item: Object) -> bool:
    group = str(item.get("apiVersion", "")).rpartition("/")[0]
    return any(group == known.rpartition("/")[0] for known, _ in _crds())


def schema_of(item: Object) -> Object | None:
    return _crds().get((str(item.get("apiVersion")), str(item.get("kind"))))


def with_defaults(item: Object) -> Object:
    """Completes a custom object as the API server does before it validates it."""
    completed = copy.deepcopy(item)
    schema = schema_of(item)
    if schema is not None:
        _complete(schema, completed)
    return completed


def _complete(schema: Object, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in (schema.get("properties") or {}).items():
            if key not in value and "default" in inner:
                value[key] = copy.deepcopy(inner["default"])
            if key in value:
                _complete(inner, value[key])
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            for inner_value in value.values():
                _complete(extra, inner_value)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for inner_value in value:
            _complete(schema["items"], inner_value)


def _unknown_fields(schema: Object, value: Any, path: str, thing: str, root: bool = False) -> Iterator[Complaint]:
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown_fields(schema.get("items") or {}, inner, f"{path}[{index}]", thing)
    elif isinstance(value, dict) and schema.get("type", "object") == "object":
        properties, extra = schema.get("properties") or {}, schema.get("additionalProperties")
        embedded = root or schema.get("x-kubernetes-embedded-resource")
        for key, inner in value.items():
            below = f"{path}.{key}" if path else str(key)
            if embedded and key in _STRUCTURE:
                continue
            if key in properties:
                yield from _unknown_fields(properties[key], inner, below, thing)
            elif isinstance(extra, dict):
                yield from _unknown_fields(extra, inner, below, thing)
            elif not (extra or schema.get("x-kubernetes-preserve-unknown-fields")):
                near = ", ".join(sorted(properties)) or "no field"
                yield Complaint(thing, below, "unknown field", f"the CRD knows here: {near[:200]}")


def _repeated_keys(schema: Object, value: Any, path: str, thing: str) -> Iterator[Complaint]:
    """Lists that are maps or sets hold each key once."""
    if isinstance(value, dict):
        for key, inner in value.items():
            below = (schema.get("properties") or {}).get(key) or schema.get("additionalProperties")
            if isinstance(below, dict):
                yield from _repeated_keys(below, inner, f"{path}.{key}" if path else key, thing)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        keys = schema.get("x-kubernetes-list-map-keys")
        seen = []
        for index, inner in enumerate(value):
            identity = {key: inner.get(key) for key in keys} if keys and isinstance(inner, dict) else inner
            if (keys or schema.get("x-kubernetes-list-type") == "set") and identity in seen:
                yield Complaint(thing, f"{path}[{index}]", f"{identity} is there twice", "name it once")
            seen.append(identity)
            yield from _repeated_keys(schema["items"], inner, f"{path}[{index}]", thing)


def _complaints(validator: Any, value: Any, thing: str, path: str) -> Iterator[Complaint]:
    for error in validator.iter_errors(value):
        leaf = jsonschema.exceptions.best_match([error]) or error
        parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in leaf.absolute_path)
        what = leaf.message if len(leaf.message) < 200 else f"{leaf.message[:90]} ... {leaf.message[-90:]}"
        yield Complaint(thing, (path + parts).strip("."), what, "write it as the API's schema says")


@functools.cache
def _crds() -> dict[tuple[str, str], Object]:
    """(apiVersion, kind) -> schema of that version."""
    schemas = {}
    for file in sorted(CRDS.glob("*.json")):
        spec = json.loads(file.read_text())["spec"]
        for version in spec["versions"]:
            if version["served"]:
                schema = version["schema"]["openAPIV3Schema"]
                _allow_null(schema)
                schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return schemas


def _allow_null(schema: Object) -> None:
    """OpenAPI's `nullable`, in the words of JSON schema."""
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    inner = [*(schema.get("properties") or {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for below in inner:
        if isinstance(below, dict):
            _allow_null(below)


@functools.cache
def _native_validator(api_version: str, kind: str) -> Any:
    group, _, version = api_version.rpartition("/")
    prefix = f"{group.split('.')[0]}-" if group else ""
    name = f"{kind.lower()}-{prefix}{version}.json"
    file = _native_folder() / name
    if "/" in kind or len(name) > _LONGEST_FILE or not file.is_file():
        return None
    registry: Any = _definitions() @ Registry()
    return jsonschema.Draft202012Validator(json.loads(file.read_text()), registry=registry, format_checker=FORMATS)


@functools.cache
def _definitions() -> Any:
    return Resource.from_contents(json.loads((_native_folder() / "_definitions.json").read_text()))


def _native_folder() -> Path:
    return Path(kubernetes_validate.__file__).parent / f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
