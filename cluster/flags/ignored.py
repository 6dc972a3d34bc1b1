"""A flag that would change nothing is refused: whoever says it expects that it does something."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cluster.checks import field_of
from twostroke.errors import ConfigError


class Ignored(NamedTuple):
    """Flags that do nothing where a condition holds."""

    flags: tuple[str, ...]
    is_so: Callable[[argparse.Namespace], bool]
    why: str


def refuse_ignored(args: argparse.Namespace, rules: Iterable[Ignored]) -> None:
    """Raises ConfigError for the first flag that was said and does nothing. `args` are a `Parser`'s."""
    for flags, is_so, why in rules:
        for flag in flags:
            if field_of(flag) in args.said and is_so(args):
                raise ConfigError(f"{flag} would be ignored: {why}", field=field_of(flag))
