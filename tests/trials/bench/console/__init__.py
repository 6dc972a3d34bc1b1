"""`python -m tests.trials.bench console`: what open pages of the console take from a router with many workers and
requests.

The router is a process as users run it, and its clients speak HTTP. Its workers are real gRPC servers that compute
nothing: they report their load as workers do, and answer at once. Requests come at a fixed rate all the time; rounds
with open pages and rounds without take turns. A page is played by calls like those of its scripts, as often.

    options  the flags, checked once        workers  a process of workers that compute nothing
    serving  those workers and a router     clients  requests at a rate, and open pages
    measure  rounds by turns: processor time of the router per request, and seconds per answer

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.console import options

EPILOG = """The ratio is that of processor time, so it needs no idle machine; the times of answers do.

examples:
  python -m tests.trials.bench console
  python -m tests.trials.bench console --pages 12 --rounds 12 --json console.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ServeError for bad flags, and where the router does not answer."""
    checked = options.options_from(args)
    from tests.trials.bench.console.measure import run_session

    return run_session(checked)
