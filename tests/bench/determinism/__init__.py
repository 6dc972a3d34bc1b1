"""`python -m tests.bench determinism`: whether streams are the same wherever they are computed, and at what cost.

    streams     the same answers alone, in a crowd, over pages of a prefill worker, and moved in the middle: compared
    session     each engine with and without --deterministic: shares of identical streams, ratios of step times

Only argparse is imported until `run` is called; torch comes then.
"""

from __future__ import annotations

import argparse

from cluster.flags.checks import file_can_be_made, positive
from twostroke.config import DEFAULT_MODEL

EPILOG = """A stream is identical if every token is, and bit-identical if every logit is. Streams are compared with the
same stream alone, its prompt computed at once. Step times are processor time of one thread, medians; engines with and
without --deterministic take turns, and a ratio is the median over turns.

examples:
  python -m tests.bench determinism
  python -m tests.bench determinism --engines float32,bfloat16:torch --streams 48 --json determinism.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default %(default)s")
    parser.add_argument(
        "--engines",
        default="bfloat16,bfloat16:torch,float32,float32:torch",
        metavar="DTYPE[:KERNELS],...",
        help="kernels as in TWOSTROKE_CPU_KERNELS; without them what a worker would choose (default %(default)s)",
    )
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of each answer (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="of each timing (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, chunks and company (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags and for a model that is not on this machine."""
    positive("--streams", args.streams)
    positive("--tokens", args.tokens)
    positive("--repeats", args.repeats)
    file_can_be_made("--json", args.json)
    from tests.bench.determinism.session import run_session

    return run_session(args)
