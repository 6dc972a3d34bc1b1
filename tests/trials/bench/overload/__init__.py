"""`python -m tests.trials.bench overload`: what a server does with more than it can do.

    options   the flags, checked once
    verdict   one run's answers to shares and seconds, runs to a verdict: pure
    memory    what every process of a server on this machine holds for itself
    session   capacity first, then the loads in turns; table, JSON

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.overload import options

EPILOG = """examples:
  twostroke serve --model paced:step_ms=20,prefill_tokens_per_s=4000 --kv-cache-memory 8M &
  python -m tests.trials.bench overload http://127.0.0.1:8000 --timeout 5
  python -m tests.trials.bench overload http://127.0.0.1:8000 --loads 1,2,3 --duration 120 --rounds 3 --json
  overload.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if the server failed, grew, or did less of use than under less load. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    from tests.trials.bench.overload.session import run_session

    return run_session(checked)
