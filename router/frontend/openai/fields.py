"""Typed reading of a JSON body: every mistake is an InvalidRequest that names its field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.frontend.text.unicode import checked_utf8
from twostroke.errors import InvalidRequest

MOST_BITS = 1024
"""Of an integer in a request: no float has more, and Python refuses to write numbers of some thousand digits."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of one half of a pair; UTF-8 itself has none."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that `body` holds."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            _check_strings(value, "")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_kind(value)}")
    return value


def _check_strings(value: Any, name: str) -> None:
    """Raises InvalidRequest that names the first string with half a surrogate pair in it."""
    if isinstance(value, str):
        checked_utf8(value, name)
    elif isinstance(value, list):
        for rank, entry in enumerate(value):
            _check_strings(entry, f"{name}[{rank}]")
    elif isinstance(value, dict):
        for key, entry in value.items():
            checked_utf8(key, name or "a name in the body")
            _check_strings(entry, f"{name}.{key}" if name else key)


class Fields:
    """Reader of one object; `null` counts as "not given"."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str) -> int | None:
        value = self._body.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            if value is not None and value.bit_length() > MOST_BITS:
                raise InvalidRequest(f"{name} must be a number of at most {MOST_BITS} bits", field=name)
            return value
        raise self._wrong(name, "an integer")

    def number(self, name: str) -> float | None:
        value = self._body.get(name)
        if value is None:
            return None
        return as_number(value, name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false")

    def string(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return checked_utf8(value, name)
        raise self._wrong(name, "a string")

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._body.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise self._wrong(name, "an object")

    def token_ids(self, name: str) -> Sequence[int]:
        value = self._body.get(name)
        if value is None:
            return ()
        if is_token_list(value):
            assert isinstance(value, list)
            return value
        raise self._wrong(name, "a list of token ids")

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._body.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(entry, str) for entry in values):
            return tuple(checked_utf8(entry, name) for entry in values)
        raise self._wrong(name, "a string or a list of strings")

    def _wrong(self, name: str, wanted: str) -> InvalidRequest:
        return InvalidRequest(f"{name} must be {wanted}, got {_kind(self._body.get(name))}", field=name)


def as_number(value: Any, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise InvalidRequest(f"{name} must be a finite number, got {_kind(value)}", field=name)


def is_token_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and set(map(type, value)) <= {int}  # of millions in no time
        and all(bound.bit_length() <= MOST_BITS for bound in (value and (min(value), max(value))))
    )


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
