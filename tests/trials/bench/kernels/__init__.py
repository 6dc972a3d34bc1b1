"""`python -m tests.trials.bench kernels`: what the engine's parts reach on this machine, over what the machine can do
at most.

    options     the flags, checked once
    limits      measured: bytes read per second, matrix products per second
    timing      repeats to a median; work (bytes, operations) and limits to the least time it can take: pure
    bench_*     the parts: attention over pages (also of each form), products with weights, whole steps of the model;
                and, where they are asked for, steps of a model with experts beside those of a dense one, and
                attention over pages of latents
    session     all of them, for each number of threads and each kind of kernels; table, JSON

Only argparse is imported until `run` is called; torch comes then.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.kernels import options

EPILOG = """The least time of a part is what its bytes take at the measured rate of reading, or its operations at the
measured rate of matrix products, whichever is longer. Both rates are measured first and last, on the machine as it is
then: leave it alone meanwhile. What fits a cache may go beyond 100 %. GPUs have a script of their own: make gpu

examples:
  python -m tests.trials.bench kernels
  python -m tests.trials.bench kernels --threads 1,2 --kernels best,torch --only decode,linear --json kernels.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags and for a model that is not on this machine."""
    checked = options.options_from(args)
    from tests.trials.bench.kernels.session import run_session

    return run_session(checked)
