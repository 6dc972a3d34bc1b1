"""`python -m tests.trials.bench decisions`: how long the router thinks about one request, in a large fleet.

Half of the workers prefill and half decode. Their caches are those of `tests.trials.bench index`, their loads are
drawn; what is timed is everything between a request with named blocks and its reservation: look, choose, reserve.

    options  the flags, checked once        measure  an index, a fleet, and many decisions: rows of times

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.decisions import options

EPILOG = (
    """Times are those of this machine as it is now. The index is filled first: a million blocks take some seconds."""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    from tests.trials.bench.decisions.measure import run_session

    return run_session(checked)
