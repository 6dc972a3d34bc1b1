"""`python -m tests.trials.bench startup`: how long `serve` takes until it is ready, and what it takes while nobody
asks.

    options  the flags, checked once
    measure  starts `serve` as a user would, and reads /proc of all its processes

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.startup import options

EPILOG = """examples:
  python -m tests.trials.bench startup
  python -m tests.trials.bench startup --first --rounds 1
  python -m tests.trials.bench startup --serve "--prefill 2 --decode 2" --json startup.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    from tests.trials.bench.startup.measure import run_session

    return run_session(checked)
