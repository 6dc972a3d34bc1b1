"""Checks of flags that several commands have. Each check raises ConfigError that names the flag."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from twostroke.base.errors import ConfigError

STDOUT = "-"


def positive(flag: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{flag} must be positive, got {value:g}", field=field_of(flag))


def file_can_be_made(flag: str, path: str | None) -> None:
    """Checks that a result can be written, before hours of measuring."""
    if path is None or path == STDOUT:
        return
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: the directory does not exist", field=field_of(flag))
    if Path(path).is_dir():
        raise ConfigError(f"{flag} {path}: is a directory", field=field_of(flag))
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: may not be written", field=field_of(flag))


def is_host_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


class Ignored(NamedTuple):
    """Flags that have no effect where a condition holds."""

    flags: tuple[str, ...]
    is_so: Callable[[argparse.Namespace], bool]
    why: str


def refuse_ignored(args: argparse.Namespace, rules: Iterable[Ignored]) -> None:
    """Raises ConfigError for the first given flag that has no effect. `args` come from a `Parser`."""
    for flags, is_so, why in rules:
        for flag in flags:
            if field_of(flag) in args.flags_given and is_so(args):
                raise ConfigError(f"{flag} would be ignored: {why}", field=field_of(flag))
