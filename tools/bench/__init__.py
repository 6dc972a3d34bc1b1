"""`twostroke bench`: load against an OpenAI-compatible endpoint or our gRPC, measured at the client's end of the wire.

    options     the flags, checked once
    load        which requests at which times: pure, seeded, or a recorded trace replayed
    client      sends the plan: open loop or fixed concurrency; http_client and grpc_client send one request each
    measure     records to percentiles: pure                   report  percentiles to a table and JSON

Beside that one run: `compare/` (several servers under the same loads) and `goodput/` (the highest rate that keeps
its promises), both over `endpoints`. `tests/bench` times parts of the product and whole clusters. Only argparse is
imported until `run` is called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

from cluster.flags.checks import refuse_ignored
from tools.bench import options
from tools.bench.options import IGNORED, options_from

__all__ = ["add_arguments", "run"]

COMMANDS = {
    "compare": "the same loads against several servers, in turns: ratios with their spread, figures",
    "goodput": "the highest request rate at which nine in ten requests are as fast as asked for",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_arguments(parser)
    parser.set_defaults(bench_command=_run_once)
    commands = parser.add_subparsers(
        title="other measurements",
        metavar="COMMAND",
        required=False,
        description="each has flags of its own and --help",
    )
    for name, summary in COMMANDS.items():
        command = import_module(f"tools.bench.{name}")
        subparser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(bench_command=command.run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if what was measured did not work. Raises ServeError for bad flags, files and endpoints."""
    command: Callable[[argparse.Namespace], int] = args.bench_command
    return command(args)


def _run_once(args: argparse.Namespace) -> int:
    """1 if every request failed."""
    refuse_ignored(args, IGNORED)
    chosen = options_from(args)
    from tools.bench.session import run_session

    return run_session(chosen)
