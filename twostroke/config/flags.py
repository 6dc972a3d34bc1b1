"""Settings as flags of a command, and flags as settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from twostroke.config.cache import memory_bytes
from twostroke.config.leaves import Leaf, build, leaves_of
from twostroke.config.settings import Settings

Kind = TypeVar("Kind", bound=Settings)
Choices = Mapping[str, Sequence[str]]
"""The words that a flag takes, where only who adds the flag knows them."""


def add(parser: argparse.ArgumentParser, kind: type[Settings], choices: Choices | None = None) -> None:
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves_of(kind):
        if leaf.title not in groups:
            groups[leaf.title] = parser.add_argument_group(leaf.title)
        groups[leaf.title].add_argument(
            leaf.flag, **_options(leaf, (choices or {}).get(leaf.flag, leaf.setting.choices))
        )


def read(kind: type[Kind], args: argparse.Namespace) -> Kind:
    """Raises ConfigError that names the flag."""
    return build(kind, {leaf: getattr(args, leaf.name) for leaf in leaves_of(kind)})


def _options(leaf: Leaf, choices: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {"default": leaf.default, "help": leaf.help.replace("%", "%%")}
    if leaf.kind is bool:
        return {**options, "action": argparse.BooleanOptionalAction}
    if leaf.is_required:
        options["required"] = True
    if leaf.is_list and not leaf.setting.commas:
        options |= {"action": "append", "default": []}
    if choices:
        options["choices"] = tuple(choices)
    elif leaf.unit is not None:
        options["metavar"] = leaf.unit
    if leaf.setting.is_size:
        options["type"] = _size
    elif leaf.kind is not str:
        options["type"] = leaf.kind
    return options


def _size(text: str) -> int:
    try:
        return memory_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
