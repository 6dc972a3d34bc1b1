"""The parser of every command: errors are one line, no flag is abbreviated, and a misspelt one gets a suggestion.

Flags between a command and its subcommand are the subcommand's: `bench --seed 5 compare` is `bench compare --seed 5`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """Parses one command. argparse creates the parsers of subcommands from the class of their parent."""

    def __init__(self, *named: Any, **options: Any) -> None:
        # A prefix that is unique today may be ambiguous tomorrow, or mean another flag.
        super().__init__(*named, **{**options, "allow_abbrev": False})
        self.words: list[str] = []
        """The arguments that are being parsed."""
        self.register("action", "parsers", _Subcommands)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; see: {self.prog} --help\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Lets a subcommand report what it does not know, with its own flags and help instead of its parent's.

        `flags_given` in the result holds the names of all flags that were given, also those with a default's value.
        """
        self.words = list(sys.argv[1:] if args is None else args)
        known, unknown = super().parse_known_args(self.words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        if "flags_given" not in known:  # a subcommand may have set it
            known.flags_given = self._flags_given()
        return known, unknown

    def _flags_given(self) -> frozenset[str]:
        own = self.words[: self.words.index("--")] if "--" in self.words else self.words
        actions = (self._option_string_actions.get(word.partition("=")[0]) for word in own)
        return frozenset(action.dest for action in actions if action is not None)

    def _meant(self, unknown: Sequence[str]) -> str:
        unknown_flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        if not unknown_flag:
            return ""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = [flag for flag in flags if flag.startswith(unknown_flag)] or difflib.get_close_matches(
            unknown_flag, flags, n=1
        )
        return f" (did you mean {' or '.join(near)}?)" if near else ""


def add_pid(parser: argparse._ActionsContainer) -> None:
    """Adds --pid, which says which of this user's running servers is meant."""
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="of the `twostroke serve` that is meant, if several are running"
    )


class _Subcommands(argparse._SubParsersAction):  # type: ignore[type-arg]  # generic in the stubs only
    """Gives a subcommand the flags before it too; argparse itself would replace them by the subcommand's defaults."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        assert isinstance(parser, Parser), "the class registers this action"
        before = parser.words[: len(parser.words) - len(values)]
        super().__call__(parser, namespace, [values[0], *before, *values[1:]], option_string)
