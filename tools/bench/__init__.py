"""`twostroke bench`: load against an OpenAI-compatible endpoint or our gRPC, measured at the client's end of the wire.

    options     the flags, checked once
    load        which requests at which times: pure, seeded, or a recorded trace replayed
    client      sends the plan: open loop or fixed concurrency; http_client and grpc_client send one request each
    measure     records to percentiles: pure                   report  percentiles to a table and JSON

Beside that one run: `compare/` (several servers under the same loads) and `goodput/` (the highest rate that keeps
its promises), both over `endpoints`. `tests/trials/bench` times parts of the product and whole clusters. Only argparse
is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from cluster.flags.checks import refuse_ignored
from tools.bench import options
from tools.bench.compare import options as compare_options
from tools.bench.goodput import options as goodput_options
from tools.bench.options import IGNORED
from tools.subcommands import Subcommand, add_subcommands, run_subcommand

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_arguments(parser)
    add_subcommands(parser, "other measurements", COMMANDS, otherwise=_run_once)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if what was measured did not work. Raises ServeError for bad flags, files and endpoints."""
    return run_subcommand(args)


def _run_once(args: argparse.Namespace) -> int:
    """Returns 1 if every request failed."""
    refuse_ignored(args, IGNORED)
    chosen = options.options_from(args)
    from tools.bench.session import run_session

    return run_session(chosen)


def _compare(args: argparse.Namespace) -> int:
    """Returns 1 if some endpoint completed no request of some load."""
    chosen = compare_options.options_from(args)
    from tools.bench.compare.session import run_session

    return run_session(chosen)


def _goodput(args: argparse.Namespace) -> int:
    """Returns 1 if some endpoint keeps the promise at no rate."""
    chosen = goodput_options.options_from(args)
    from tools.bench.goodput.session import run_session

    return run_session(chosen)


COMMANDS = {
    "compare": Subcommand(
        "the same loads against several servers, in turns: ratios with their spread, figures",
        compare_options.add_arguments,
        _compare,
        compare_options.EPILOG,
    ),
    "goodput": Subcommand(
        "the highest request rate at which nine in ten requests are as fast as asked for",
        goodput_options.add_arguments,
        _goodput,
        goodput_options.EPILOG,
    ),
}
