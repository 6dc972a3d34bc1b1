"""Mistakes, put into copies of rendered objects by words: `put("Service/router", "spec.ports[http].port", 0)`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.deploy.manifests.objects import Object, name_of

Change = Callable[[list[Object]], None]


class Mutant(NamedTuple):
    what: str
    check: str
    """The only one that complains of it."""
    change: Change
    bundle: str = "prod-gpu+all"


def mutated(objects: list[Object], change: Change) -> list[Object]:
    changed = copy.deepcopy(objects)
    change(changed)
    return changed


def put(thing: str, path: str, value: Any) -> Change:
    def change(objects: list[Object]) -> None:
        holder, key = _holder(objects, thing, path)
        holder[key] = value

    return change


def drop(thing: str, path: str) -> Change:
    def change(objects: list[Object]) -> None:
        holder, key = _holder(objects, thing, path)
        del holder[key]

    return change


def add(thing: str, path: str, value: Any) -> Change:
    """To the end of a list."""

    def change(objects: list[Object]) -> None:
        holder, key = _holder(objects, thing, path)
        holder[key] = [*(holder[key] or []), value] if isinstance(holder, list) else [*(holder.get(key) or []), value]

    return change


def swap(thing: str, path: str, old: str, new: str) -> Change:
    """In a text."""

    def change(objects: list[Object]) -> None:
        holder, key = _holder(objects, thing, path)
        assert old in holder[key], f"{thing} {path} has no {old!r}"
        holder[key] = holder[key].replace(old, new)

    return change


def swap_in_list(thing: str, path: str, old: str, new: str) -> Change:
    """In every text of a list; one has it."""

    def change(objects: list[Object]) -> None:
        holder, key = _holder(objects, thing, path)
        assert any(old in word for word in holder[key]), f"{thing} {path} has no {old!r}"
        holder[key] = [word.replace(old, new) for word in holder[key]]

    return change


def without(thing: str) -> Change:
    def change(objects: list[Object]) -> None:
        objects.remove(_find(objects, thing))

    return change


def insert(item: Object) -> Change:
    """With the labels that all have, and those that it has itself."""

    def change(objects: list[Object]) -> None:
        added = copy.deepcopy(item)
        shared = [set((one["metadata"].get("labels") or {}).items()) for one in objects if one["kind"] == "Service"]
        labels = {"app.kubernetes.io/component": "further", **dict(set.intersection(*shared))}
        if "metadata" in added:
            added["metadata"]["labels"] = {**labels, **(added["metadata"].get("labels") or {})}
        objects.append(added)

    return change


def twice(thing: str) -> Change:
    def change(objects: list[Object]) -> None:
        objects.append(copy.deepcopy(_find(objects, thing)))

    return change


def both(*changes: Change) -> Change:
    def change(objects: list[Object]) -> None:
        for one in changes:
            one(objects)

    return change


def _find(objects: list[Object], thing: str) -> Object:
    """Returns the object called Kind/name; a hash that kustomize appended may be left out."""
    kind, _, name = thing.partition("/")
    for item in objects:
        if item["kind"] == kind and re.fullmatch(rf"{re.escape(name)}(-[a-z0-9]{{10}})?", name_of(item)):
            return item
    raise LookupError(f"no {thing}: {sorted(one['kind'] + '/' + name_of(one) for one in objects)}")


def _holder(objects: list[Object], thing: str, path: str) -> tuple[Any, Any]:
    """What has the path's last part, and its key there. `[x]` finds by name, groupName or alert, `[.]` is a dot."""
    value: Any = _find(objects, thing)
    parts = re.findall(r"\[([^\]]+)\]|((?:[^.\[\]]|\[\.\])+)", path)
    keys: list[Any] = [index or key.replace("[.]", ".") for index, key in parts]
    for number, (key, (index, _)) in enumerate(zip(keys, parts, strict=True)):
        here = _position(value, key) if index and isinstance(value, list) else key
        if number == len(keys) - 1:
            return value, here
        if isinstance(value, dict) and here not in value:
            value[here] = {}
        value = value[here]
    raise AssertionError(path)


def _position(value: list[Any], key: str) -> int:
    if key.isdigit():
        return int(key)
    for number, entry in enumerate(value):
        if key in (entry.get("name"), entry.get("groupName"), entry.get("alert")):
            return number
    raise LookupError(f"no {key} in {value}")
