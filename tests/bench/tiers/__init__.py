"""`python -m tests.bench tiers`: chats that do not fit into the pages, with and without tiers below these.

    options  the flags, checked once
    measure  one real cluster per variant: every chat's turns in rounds, then prompts that nobody repeats

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.bench.tiers import options

EPILOG = """examples:
  python -m tests.bench tiers
  python -m tests.bench tiers --chats 48 --turns 6 --json tiers.json
  python -m tests.bench tiers --variants none,disk --unique 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    from tests.bench.tiers.measure import run_session

    return run_session(checked)
