"""Values that no API server takes, put everywhere into what is rendered: the checks notice each and never break down.

The gate tries a sample, always the same one. `python -m tests.deploy.test_generated_mistakes` tries them all.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.bundles import bundles
from tests.deploy.manifests.checks import Checker
from tests.deploy.manifests.objects import Object, where

SAMPLE, SEED = 40, 13
NAMED = ("dev-cpu+hpa", "prod-gpu+all")
LONG_NUMBERS = ("terminationGracePeriodSeconds",)
"""64 bits wide, without a bound."""
Path = tuple[str | int, ...]


@functools.cache
def checker() -> Checker:
    return Checker()


def values(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        if key not in ("data", "stringData", "annotations", "labels", "matchLabels"):
            yield from values(below, (*path, key))


def refused(value: Any, path: Path) -> list[Any]:
    """What no API server takes in place of it."""
    if isinstance(value, bool):
        return ["yes", 7]
    if isinstance(value, int):
        too_large = [] if path[-1] in LONG_NUMBERS else [1 << 40]
        return ["7 x", {}, *too_large]
    if isinstance(value, str):
        return [{}, []]
    if isinstance(value, dict) and value and path:
        return ["text", {**value, "noSuchField": 1}] if "metadata" not in path else ["text"]
    return ["text"] if isinstance(value, list) else []


@pytest.mark.parametrize("name", NAMED)
def test_what_no_api_server_takes_is_noticed_wherever_it_is(name: str) -> None:
    known = places(name)
    assert len(known) > 1000
    for place in random.Random(SEED).sample(known, SAMPLE):
        assert is_noticed(name, *place), place


def places(name: str) -> list[tuple[int, Path, Any]]:
    """(number of the object, path in it, what is put there)."""
    return [
        (number, path, wrong)
        for number, item in enumerate(bundles()[name])
        if item["kind"] not in ("PrometheusRule", "ConfigMap")
        for path, value in values(item)
        if path[:1] != ("metadata",) or path[1:] == ("name",)
        for wrong in refused(value, path)
    ]


def is_noticed(name: str, number: int, path: Path, wrong: Any) -> bool:
    objects = bundles()[name]
    changed = [*objects[:number], broken(objects[number], path, wrong), *objects[number + 1 :]]
    found = {finding.where for finding in checker().findings(changed)}
    return bool(found & {where(changed[number]), where(objects[number])})


def broken(item: Object, path: Path, wrong: Any) -> Object:
    changed = copy.deepcopy(item)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = wrong
    return changed


if __name__ == "__main__":
    for bundle in NAMED:
        missed = [place for place in places(bundle) if not is_noticed(bundle, *place)]
        print(f"{bundle}: {len(places(bundle))} mistakes, {len(missed)} not noticed", *missed, sep="\n  ")
