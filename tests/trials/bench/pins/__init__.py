"""`python -m tests.trials.bench pins`: a pinned system prompt beside one that was only used, over floods and a killed
worker.

    options  the flags, checked once
    measure  starts `serve` as a user would, with a pool that a flood of other prompts fills several times

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.pins import options

EPILOG = """examples:
  python -m tests.trials.bench pins
  python -m tests.trials.bench pins --rounds 9 --json pins.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 where the pin was lost or changed an answer. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    from tests.trials.bench.pins.measure import run_session

    return run_session(checked)
