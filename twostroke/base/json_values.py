"""Frozen dataclasses as JSON and back, for what travels between processes or lies in files."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from typing import Any, TypeVar

from twostroke.base.errors import ConfigError

Config = TypeVar("Config")


def to_json(config: object) -> str:
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return json.dumps(dataclasses.asdict(config))


def from_json(kind: type[Config], text: str) -> Config:
    """Returns the config that `to_json` wrote. Raises ConfigError for unknown keys and wrong shapes."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{kind.__name__} is not valid JSON: {error}") from error
    return from_values(kind, values)


def from_values(kind: type[Config], values: Any) -> Config:
    """Returns the same from JSON that is parsed already."""
    return _build(kind, values, kind.__name__)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Returns the types of a class's fields. They are kept, because request logs have thousands of lines."""
    return typing.get_type_hints(kind)


def _build(kind: type[Config], values: Any, where: str) -> Config:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object, got {type(values).__name__}", field=where)
    assert dataclasses.is_dataclass(kind)
    hints = _hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(f"{where} has unknown keys {unknown}; known are {sorted(hints)}", field=unknown[0])
    needed = [part.name for part in dataclasses.fields(kind) if part.default is part.default_factory]  # both missing
    missing = sorted(set(needed) - set(values))
    if missing:
        raise ConfigError(f"{where} needs {missing}", field=missing[0])
    return kind(**{name: _convert(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    if value is None and isinstance(hint, types.UnionType):
        return None
    hint = _bare(hint)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, got {value!r}", field=where)
        return tuple(_convert(typing.get_args(hint)[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be an object, got {value!r}", field=where)
        return {key: _convert(typing.get_args(hint)[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        known = [each.value for each in hint]
        if value not in known:
            raise ConfigError(f"{where} must be one of {known}, got {value!r}", field=where)
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value, where)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be {hint.__name__}, got {value!r}", field=where)
    return value


def _bare(hint: Any) -> Any:
    """Returns a type without "or None", and without a NewType's name."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    return hint.__supertype__ if isinstance(hint, typing.NewType) else hint


def _float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{where} is too large a number", field=where) from error
