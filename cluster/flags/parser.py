"""The parser of every command: what is wrong is one line, no flag is abbreviated, and a misspelt one is recognised."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """Parsers of subcommands are of this class, too: argparse makes them of their parent's class."""

    def __init__(self, *named: Any, **options: Any) -> None:
        # A prefix that is unique today may be ambiguous tomorrow, or mean another flag.
        super().__init__(*named, **{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; see: {self.prog} --help\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """A subcommand itself says what it does not know: its parent would name its own flags and help."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return known, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        said = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        if not said:
            return ""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = [flag for flag in flags if flag.startswith(said)] or difflib.get_close_matches(said, flags, n=1)
        return f" (did you mean {' or '.join(near)}?)" if near else ""
