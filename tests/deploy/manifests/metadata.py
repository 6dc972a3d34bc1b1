"""Names, labels and annotations, of objects and of pods."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.manifests.objects import (
    CLUSTER_KINDS,
    Bundle,
    Complaint,
    Object,
    PodTemplate,
    name_of,
    namespace_of,
    where,
)
from tests.deploy.manifests.words import LABEL, SERVICE_NAME, is_label_value, is_qualified_name, is_subdomain

_CLUSTER_NAME_MOST = 63
_RECOMMENDED = "app.kubernetes.io/"
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


def names_are_valid(item: Object) -> Iterator[Complaint]:
    name, kind = name_of(item), item.get("kind")
    valid = {"Service": SERVICE_NAME.fullmatch, "Namespace": LABEL.fullmatch}.get(str(kind), is_subdomain)(name)
    if not valid or (kind == "RayCluster" and len(name) > _CLUSTER_NAME_MOST):
        yield Complaint(where(item), "metadata.name", f"{name!r} is not valid", "use a-z, 0-9 and -, a letter first")


def labels_are_valid(item: Object) -> Iterator[Complaint]:
    """Wherever the object has labels or matches them."""
    for path, labels in _label_maps(item, ""):
        for key, value in labels.items():
            if not is_qualified_name(key):
                yield Complaint(where(item), path, f"{key!r} is not a label key", "write name or dns.prefix/name")
            elif not is_label_value(value):
                todo = "use at most 63 of letters, digits, -, _ and ., quoted where YAML would read a number"
                yield Complaint(where(item), f"{path}.{key}", f"{value!r} is not a label value", todo)
    for key in (item.get("metadata") or {}).get("annotations") or {}:
        if not is_qualified_name(key):
            todo = "write name or dns.prefix/name"
            yield Complaint(where(item), "metadata.annotations", f"{key!r} is not an annotation key", todo)


def selectors_are_well_formed(item: Object) -> Iterator[Complaint]:
    """Wherever the object matches labels by expressions."""
    for path, expression in _expressions(item, ""):
        operator, values = expression.get("operator"), expression.get("values")
        if operator not in _OPERATORS:
            what, todo = f"operator {operator!r} is not known", f"use one of: {', '.join(_OPERATORS)}"
            yield Complaint(where(item), path, what, todo)
        elif bool(values) != (operator in ("In", "NotIn")):
            what = f"{operator} {'without' if not values else 'with'} values"
            yield Complaint(where(item), path, what, "In and NotIn have values, Exists and DoesNotExist have none")


def labels_are_the_recommended_ones(bundle: Bundle) -> Iterator[Complaint]:
    """Checks that all objects say the same of where they belong, and each which part it is, once one says who manages
    it."""
    labels = {where(item): (item.get("metadata") or {}).get("labels") or {} for item in bundle.objects}
    first = next((told for told in labels.values() if f"{_RECOMMENDED}managed-by" in told), None)
    for item in bundle.objects if first is not None else ():
        assert first is not None
        told = labels[where(item)]
        if item.get("kind") in CLUSTER_KINDS | {"PersistentVolumeClaim"}:
            continue  # made once, before
        for name in ("name", "instance", "part-of", "managed-by", "version"):
            key = _RECOMMENDED + name
            if told.get(key) != first.get(key) or key not in told:
                what = f"{told.get(key, 'none')}, and {first.get(key, 'none')} elsewhere"
                yield Complaint(where(item), f"metadata.labels.{key}", what, "take in components/labels, last of all")
        if not told.get(f"{_RECOMMENDED}component"):
            what = "none: what of it is this?"
            yield Complaint(where(item), f"metadata.labels.{_RECOMMENDED}component", what, "router, head, network, ...")
        if told.get(f"{_RECOMMENDED}version") not in (None, project_version()):
            what = f"{told[f'{_RECOMMENDED}version']}, and this is {project_version()}"
            yield Complaint(where(item), f"metadata.labels.{_RECOMMENDED}version", what, "as pyproject.toml")


@functools.cache
def project_version() -> str:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    return str(tomllib.loads(text)["project"]["version"])


def expressions_name_pods(bundle: Bundle) -> Iterator[Complaint]:
    """Each value that a selector of pods lists is one that some pod has."""
    for item in bundle.of("PodMonitor", "NetworkPolicy", "PodDisruptionBudget"):
        for path, expression in _expressions(item.get("spec"), "spec"):
            known = {pod.labels.get(str(expression.get("key"))) for pod in bundle.pods} - {None}
            listed = expression.get("values") or [] if expression.get("operator") == "In" else []
            for value in listed if known & set(listed) else []:
                if value not in known:
                    what, todo = f"no pod has {expression['key']}={value}", f"use {', '.join(sorted(map(str, known)))}"
                    yield Complaint(where(item), path, what, todo)


def ray_group_labels_match(pod: PodTemplate) -> Iterator[Complaint]:
    """A group's `labels` become labels of Ray's nodes and of pods; the template must not say something else."""
    for key, value in ((pod.metadata.get("labels") or {}) if pod.owner == "RayCluster" else {}).items():
        role = pod.labels.get("role")
        if key == "app.kubernetes.io/component" and {value, role} == {"prefill", "decode"}:
            place, what = f"{pod.path}.metadata.labels.{key}", f"{value}, and the group's label role is {role}"
            yield Complaint(pod.where, place, what, "make them equal: budgets and policies go by one, workers by both")
        if key in ("ray.io/node-type", "ray.io/group", "ray.io/cluster"):
            place = f"{pod.path}.metadata.labels.{key}"
            yield Complaint(pod.where, place, f"{value!r} will be overwritten by KubeRay", "leave it out")


def namespaces_are_named(bundle: Bundle) -> Iterator[Complaint]:
    known = {name_of(item) for item in bundle.of("Namespace")}
    for item in bundle.objects:
        kind, namespace = str(item.get("kind")), namespace_of(item)
        if kind in CLUSTER_KINDS and namespace:
            yield Complaint(where(item), "metadata.namespace", f"a {kind} lives in no namespace", "leave it out")
        elif known and kind not in CLUSTER_KINDS and namespace not in known:
            what = f"namespace {namespace!r} is not made here"
            yield Complaint(where(item), "metadata.namespace", what, f"use {', '.join(sorted(known))}")


def objects_are_there_once(bundle: Bundle) -> Iterator[Complaint]:
    seen = set()
    for item in bundle.objects:
        group = str(item.get("apiVersion", "")).rpartition("/")[0]
        identity = (group, item.get("kind"), namespace_of(item), name_of(item))
        if identity in seen:
            yield Complaint(where(item), "metadata.name", "is there twice", "rename one or leave it out")
        seen.add(identity)


def _label_maps(value: Any, path: str) -> Iterator[tuple[str, Object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            below = f"{path}.{key}" if path else str(key)
            is_map = isinstance(inner, dict) and all(not isinstance(one, dict | list) for one in inner.values())
            plain_selector = key == "selector" and path == "spec"
            if is_map and (key in ("labels", "matchLabels", "nodeSelector") or plain_selector):
                yield below, inner
            elif key not in ("data", "stringData"):
                yield from _label_maps(inner, below)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _label_maps(inner, f"{path}[{index}]")


def _expressions(value: Any, path: str) -> Iterator[tuple[str, Object]]:
    """Those of nodes' affinity have operators of their own."""
    if isinstance(value, dict):
        for key, inner in value.items():
            below = f"{path}.{key}" if path else str(key)
            if key == "matchExpressions" and isinstance(inner, list):
                yield from ((f"{below}[{index}]", one) for index, one in enumerate(inner))
            elif key not in ("data", "stringData", "nodeAffinity"):
                yield from _expressions(inner, below)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _expressions(inner, f"{path}[{index}]")
