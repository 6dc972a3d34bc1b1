"""`python -m tests.trials.bench weights`: what each format of quantised weights costs in quality, and how fast it is.

    options   the flags, checked once
    copies    a model's weights rounded into each format, as files
    session   all formats beside bfloat16: predictions, times of decode steps and of prefill; JSON

Only argparse is imported until `run` is called; torch comes then.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.weights import options

EPILOG = """The bfloat16 weights are rounded into each format: to the nearest, but for "GPTQ of 4 bits, act-order",
which is GPTQ itself, calibrated on what follows the windows. Windows, the beginning of the text, are computed in
chunks, and every position but the last predicts the next token. KL is the distance of the next token's distribution
from that of bfloat16, in nats; "same" is the share of positions whose likeliest token is the same. Times are the least
of several, formats in turns.

examples:
  python -m tests.trials.bench weights
  python -m tests.trials.bench weights --formats FP8 AWQ --json weights.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags and for a model that is not on this machine."""
    checked = options.options_from(args)
    from tests.trials.bench.weights.session import run_session

    return run_session(checked)
