"""`python -m tests.trials.bench determinism`: whether streams are the same wherever they are computed, and at what
cost.

    options     the flags, checked once
    streams     the same answers alone, in a crowd, over pages of a prefill worker, and moved in the middle: compared
    session     each engine with and without --deterministic: shares of identical streams, ratios of step times

Only argparse is imported until `run` is called; torch comes then.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.determinism import options

EPILOG = """A stream is identical if every token is, and bit-identical if every logit is. Streams are compared with the
same stream alone, its prompt computed at once. Step times are processor time of one thread, medians; engines with and
without --deterministic take turns, and a ratio is the median over turns.

examples:
  python -m tests.trials.bench determinism
  python -m tests.trials.bench determinism --engines float32,bfloat16:torch --streams 48 --json determinism.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags and for a model that is not on this machine."""
    checked = options.options_from(args)
    from tests.trials.bench.determinism.session import run_session

    return run_session(checked)
