"""Runs the commands of a program. `PROGRAM` has those that start and operate a cluster.

`tools.cli` adds the commands that measure and simulate; it is what `twostroke` runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from cluster.commands import COMMANDS, Command
from cluster.flags.parser import USAGE_ERROR, Parser
from twostroke import __version__
from twostroke.base.errors import ConfigError, ServeError

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    description: str
    commands: Mapping[str, Command]
    extra: str = ""
    """The extra of the distribution that brings `packages`, which some commands need."""
    packages: frozenset[str] = frozenset()

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs the command that `arguments` name, and returns its exit status (see `status_of`)."""
        arguments = sys.argv[1:] if arguments is None else list(arguments)

        def run() -> int:
            try:
                args = self.parser(arguments).parse_args(arguments)
                command: Callable[[argparse.Namespace], int] = args.run
                return command(args)
            except ModuleNotFoundError as error:
                if error.name not in self.packages:
                    raise
                install = f"pip install '{self.name}[{self.extra}]'"
                raise ConfigError(f"this command needs {error.name}, which is not installed: {install}") from error

        return status_of(run, self.name)

    def parser(self, arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
        """Builds the parser. Only the module of the named command is imported: `status` loads no Ray."""
        parser = Parser(prog=self.name, description=self.description)
        parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
        commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        asked = next((argument for argument in arguments if not argument.startswith("-")), None)
        for name, command in self.commands.items():
            subparser = commands.add_parser(
                name, help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}."
            )
            if name == asked:
                module = import_module(command.module)
                module.add_arguments(subparser)
                subparser.set_defaults(run=module.run)
        return parser


def status_of(run: Callable[[], int], name: str) -> int:
    """Returns 0 for success, 1 for a negative result, 2 for wrong flags, files or servers, 130 when interrupted or when
    the reader of the output has gone.
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # at exit it would be too late to see that the reader has gone
    except ServeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has closed it; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED


DESCRIPTION = "Serve a language model with prefill and decode on different workers."
PROGRAM = Program("twostroke", DESCRIPTION, COMMANDS)


if __name__ == "__main__":
    sys.exit(PROGRAM.main())
