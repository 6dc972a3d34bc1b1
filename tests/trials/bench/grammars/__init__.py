"""`python -m tests.trials.bench grammars`: decode steps whose answers all have grammars, beside steps without any.

The model is real. Sixteen answers follow a JSON schema; a step with them includes all that grammars add to it: masks,
the choice among permitted tokens, the token that is consumed and forced ones after it.

    options  the flags, checked once        measure  both kinds of steps by turns, on one engine: a table, JSON
"""

from __future__ import annotations

import argparse

from tests.trials.bench.grammars import options

EPILOG = """Times are only worth something on a machine that does nothing else.

examples:
  python -m tests.trials.bench grammars
  python -m tests.trials.bench grammars --threads 2 --repeats 400 --json grammars.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ServeError for bad flags and for a model that is not on this machine."""
    checked = options.options_from(args)
    from tests.trials.bench.grammars.measure import run_session

    return run_session(checked)
