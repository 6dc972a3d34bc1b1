"""The settings of a class and of the classes in it as one list: for command lines, cluster files and docs."""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from twostroke.base.errors import ConfigError
from twostroke.config.cache import size_text
from twostroke.config.settings import Setting, Settings, SettingsGroup, declared, flag_of, plain_type

Kind = TypeVar("Kind", bound=Settings)
UNITS = {int: "N", float: "SECONDS", str: None, bool: None}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting, and where it stands."""

    path: tuple[str, ...]
    """The names of the fields that lead to it."""
    setting: Setting
    kind: type
    """bool, int, float or str; that of the items of a list."""
    is_list: bool
    declared_default: Any
    is_required: bool
    section: str
    title: str
    """The title over its group in help."""

    @property
    def flag(self) -> str:
        return flag_of(self.path[-1], self.setting)

    @property
    def name(self) -> str:
        """The name of the flag in argparse's namespace."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def key(self) -> str:
        """The path in the cluster file."""
        return self.setting.key or f"{self.setting.section or self.section}.{self.name}"

    @property
    def unit(self) -> str | None:
        return self.setting.unit or UNITS[self.kind]

    @property
    def default(self) -> Any:
        """The declared default, or what the environment has instead."""
        from_environment = os.environ.get(self.setting.variable) if self.setting.variable else None
        return from_environment or self.declared_default

    @property
    def default_text(self) -> str | None:
        """None: there is no default, or nothing to say about it."""
        setting, default = self.setting, self.declared_default
        if self.is_required or setting.default_text is not None:
            return setting.default_text
        if isinstance(default, bool):
            return "on" if default else "off"
        if default == 0 and setting.zero:
            return setting.zero
        if setting.is_size and default is not None:
            return size_text(default)
        if default is None:
            return None
        return f"{default:g}" if isinstance(default, float) else str(default)

    @property
    def help(self) -> str:
        zero = f"; 0: {self.setting.zero}" if self.setting.zero and self.declared_default != 0 else ""
        shown = f" (default: {self.default_text})" if self.default_text is not None else ""
        return f"{self.setting.help}{zero}{shown}"

    def stored(self, value: Any) -> Any:
        """Returns what the field gets for a value that a flag or a file has. Raises ConfigError for an empty path."""
        if self.is_list and value is not None:
            words = value.split(",") if isinstance(value, str) else value
            return tuple(self._located(word) if self.setting.is_path else word for word in words)
        return self._located(value) if self.setting.is_path and value is not None else value

    def _located(self, path: str) -> str:
        if not path:
            raise ConfigError(f"{self.flag} is empty; name a path, or leave it out", field=".".join(self.path))
        return str(Path(path).expanduser().absolute())


@functools.cache
def leaves_of(kind: type[Settings]) -> Sequence[Leaf]:
    """Returns every setting that has a flag, in the order of help."""
    found = list(_leaves(kind, (), SettingsGroup("", "")))
    titles = list(dict.fromkeys(leaf.title for leaf in found))
    return sorted(found, key=lambda leaf: titles.index(leaf.title))


def build(kind: type[Kind], values: Mapping[Leaf, Any]) -> Kind:
    """Returns settings with these values, and defaults for the others. Raises ConfigError that names the flag."""
    tree: dict[str, Any] = {}
    for leaf in leaves_of(kind):
        branch = tree
        for name in leaf.path[:-1]:
            branch = branch.setdefault(name, {})
        branch[leaf.path[-1]] = leaf.stored(values.get(leaf, leaf.default))
    return kind.model_validate(tree)


def _leaves(kind: type[Settings], path: tuple[str, ...], at: SettingsGroup) -> Iterator[Leaf]:
    settings = declared(kind)
    for name, field in kind.model_fields.items():
        nested = next((each for each in field.metadata if isinstance(each, SettingsGroup)), None)
        if nested is not None:
            assert isinstance(field.annotation, type)
            assert issubclass(field.annotation, Settings)
            yield from _leaves(field.annotation, (*path, name), nested)
        elif name in settings and not settings[name].is_hidden:
            yield _leaf((*path, name), field, settings[name], at)


def _leaf(path: tuple[str, ...], field: FieldInfo, setting: Setting, at: SettingsGroup) -> Leaf:
    section = at.section or setting.section
    assert section, f"{path[-1]} is in no group and names no section"
    return Leaf(
        path=path,
        setting=setting,
        kind=plain_type(field.annotation),
        is_list=any(typing.get_origin(arm) is tuple for arm in (field.annotation, *typing.get_args(field.annotation))),
        declared_default=None if field.is_required() else field.default,
        is_required=field.is_required(),
        section=section,
        title=at.title or section,
    )
