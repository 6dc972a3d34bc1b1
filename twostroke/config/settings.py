"""What every settings class is built from: `Settings`, and the fields that `setting` and `group` declare.

A field is checked when a value is made, be it of flags, a cluster file, or the JSON that a worker gets. What is wrong
is one ConfigError that names the flag.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from twostroke.base.errors import ConfigError

MOST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a field says beyond its type and default."""

    help: str
    unit: str | None = None
    """How help names the value: "SECONDS". None: by the type."""
    flag: str | None = None
    """None: derived from the field's name."""
    key: str | None = None
    """The key in the cluster file, as "section.name". None: the group's section and the flag's name."""
    section: str | None = None
    """The section of help and of the cluster file, for a field that is in no group."""
    variable: str | None = None
    """The environment variable whose value is the default."""
    default_text: str | None = None
    """How help shows the default. None: the value itself."""
    is_hidden: bool = False
    """Whether only code and tests choose it: it has no flag and no key."""
    is_size: bool = False
    """Whether it is a number of bytes, which people write as 2GiB."""
    is_path: bool = False
    """Whether it is a path, which is made absolute: other processes have other working directories."""
    commas: bool = False
    """Whether it is several words with commas between them. A list without `commas` is a flag that is repeated."""
    least: int | None = None
    zero: str | None = None
    """What 0 means."""
    above: float | None = None
    most: float | None = None
    below: float | None = None
    power_of_two: bool = False
    choices: tuple[str, ...] = ()
    pattern: str | None = None
    must: str | None = None
    """What the value must be, in words, where the bounds do not say it."""

    def refuses(self, value: Any) -> bool:
        if isinstance(value, str):
            is_choice = not self.choices or value in self.choices
            return not is_choice or (self.pattern is not None and re.fullmatch(self.pattern, value) is None)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return not (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (not self.power_of_two or value.bit_count() == 1)  # type: ignore[union-attr]  # a whole number
        )

    @property
    def bounds(self) -> str:
        """What the value must be, in words; empty where every value of the type will do."""
        if self.must is not None:
            return self.must
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        prefix = "a power of two " if self.power_of_two else ""
        if self.least is not None and self.most is not None:
            return f"{prefix}from {self.least} to {self.most}"
        if self.least is not None and self.below is not None:
            return f"at least {self.least} and below {self.below}"
        if self.above is not None:
            return "positive and finite" if self.most is None else f"more than {self.above} and at most {self.most}"
        if self.least is not None:
            return f"{self.least} ({self.zero}) or more" if self.zero and not self.least else f"{self.least} or more"
        return ""


@dataclass(frozen=True, slots=True)
class SettingsGroup:
    """The place of a nested Settings class in help and in the cluster file."""

    section: str
    title: str


def _field(default: Any, mark: object, **options: Any) -> Any:
    """Returns a pydantic field that carries `mark`."""
    found: FieldInfo = Field(default, **options)
    found.metadata.append(mark)
    return found


def setting(default: Any, *, help: str, secret: bool = False, **options: Any) -> Any:  # noqa: A002  # as argparse says it
    """Returns a field that users set. `options` are fields of `Setting`."""
    is_list = isinstance(default, tuple) or "commas" in options  # JSON has lists, not tuples
    strict = False if is_list else None
    return _field(default, Setting(help=help, **options), description=help, repr=not secret, strict=strict)


def setting_of(kind: type[Settings], name: str, **options: Any) -> Any:
    """Declares the setting of another class again, with these `options` changed: an edit there changes both."""
    field, other = kind.model_fields[name], declared(kind)[name]
    values = ((each, getattr(other, each.name)) for each in dataclasses.fields(other))
    there = {each.name: value for each, value in values if value != each.default}
    return setting(options.pop("default", field.default), secret=not field.repr, **{**there, **options})


def port(default: int | None = 0, *, help: str, **options: Any) -> Any:  # noqa: A002  # as argparse says it
    return setting(default, help=help, unit="PORT", least=0, most=MOST_PORT, zero="any free one", **options)


def group(kind: type[Settings], section: str, title: str | None = None) -> Any:
    """Declares a field that holds the settings of another class."""
    return _field(PydanticUndefined, SettingsGroup(section, title or section), default_factory=kind, strict=False)


class Settings(BaseModel):
    """Frozen values that are checked once, when they are born."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, handler: Any) -> Any:
        try:
            return handler(values)
        except ValidationError as error:
            raise _in_words(cls, error.errors(include_url=False)[0]) from None

    @field_validator("*", mode="after")
    @classmethod
    def _keep_bounds(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        found = declared(cls).get(info.field_name)
        if found is not None and found.refuses(value):
            raise _error(cls, info.field_name, f"must be {found.bounds}, got {_shown(value)}")
        return value

    def replace(self, **changes: Any) -> Self:
        """Returns the same settings but for `changes`, checked anew."""
        return type(self)(**{**dict(self), **changes})

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the value that `to_json` wrote. Raises ConfigError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__} is not valid JSON: {error.errors()[0]['msg']}") from None


@functools.cache
def declared(kind: type[Settings]) -> dict[str, Setting]:
    """Returns the settings among the fields of a class, by field."""
    return {
        name: each for name, field in kind.model_fields.items() for each in field.metadata if isinstance(each, Setting)
    }


def flag_of(field_name: str, setting: Setting) -> str:
    return setting.flag or f"--{field_name.removesuffix('_s').replace('_', '-')}"


def plain_type(hint: Any) -> Any:
    """Returns a field's type without "or None"; of a list, what it is a list of."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _in_words(kind: type[Settings], error: ErrorDetails) -> ConfigError:
    where, name = error["loc"], kind.__name__
    if not where:
        return ConfigError(f"{name} must be an object, got {_shown(error['input'])}", field=name)
    field = str(where[0])
    if error["type"] == "extra_forbidden":
        return ConfigError(f"{name} has no setting {field}; known are {', '.join(kind.model_fields)}", field=field)
    if error["type"] == "missing":
        return ConfigError(f"{name} needs {field}", field=field)
    hint = kind.model_fields[field].annotation
    kind_text = KINDS.get(plain_type(hint), "")
    if error["type"] == "tuple_type":
        kind_text = "a list"
    if error["type"] == "enum":
        kind_text = f"one of {error['ctx']['expected']}"
    what = f"must be {kind_text}" if kind_text else error["msg"]
    place = "".join(f"[{part!r}]" for part in where[1:])
    return _error(kind, field, f"{what}, got {_shown(error['input'])}", place)


def _error(kind: type[Settings], field: str, why: str, place: str = "") -> ConfigError:
    known = declared(kind).get(field)
    name = f"{kind.__name__}.{field}" if known is None or known.is_hidden else flag_of(field, known)
    return ConfigError(f"{name}{place} {why}", field=name)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (str, list, dict)) else f"{value}"
