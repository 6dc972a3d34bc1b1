"""`python -m tests.trials.bench open-prompts`: processor time that each worker spends on a long prompt, beside the
model and beside copies of pages, while several such prompts are open at once.

The model only waits (`paced:`), its pages are small, and the workers are the processes that `serve` starts.

    options  the flags, checked once        prompts  a client that keeps so many prompts open at one decode worker
    measure  a cluster per number of open prompts, and processor time over prompts: rows

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.open_prompts import options

EPILOG = """examples:
  python -m tests.trials.bench open-prompts
  python -m tests.trials.bench open-prompts --open 1,16 --tokens 128000 --json open.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    from tests.trials.bench.open_prompts.measure import run_session

    return run_session(checked)
