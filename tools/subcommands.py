"""Commands below a command that also runs without any."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple

Run = Callable[[argparse.Namespace], int]


class Subcommand(NamedTuple):
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Run
    epilog: str | None = None


def add_subcommands(
    parser: argparse.ArgumentParser, title: str, commands: Mapping[str, Subcommand], otherwise: Run
) -> None:
    """Lets `run_subcommand` run the command that was named, or `otherwise`."""
    parser.set_defaults(run_subcommand=otherwise)
    subparsers = parser.add_subparsers(
        title=title, metavar="COMMAND", required=False, description="each has flags of its own and --help"
    )
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run_subcommand=command.run)


def run_subcommand(args: argparse.Namespace) -> int:
    run: Run = args.run_subcommand
    return run(args)
