"""`python -m tests.chaos.faults`: flags, and the exit status."""

from __future__ import annotations

import argparse
import sys

from cluster.cli import status_of
from cluster.flags.parser import Parser
from tests.chaos.faults.options import add_arguments, options_from
from tests.chaos.faults.session import run_session

PROGRAM = "python -m tests.chaos.faults"
EPILOG = """The exit status is 1 if anything was lost, left behind or not reached. Ctrl-C stops the cluster, too.

examples:
  python -m tests.chaos.faults --write docs/faults.md
  python -m tests.chaos.faults --only "decode/pull.*/kill" --transports tcp --seed 7
  python -m tests.chaos.faults --model smollm2-135m --dtype float32 --sample 10 --write docs/faults.md
"""


def main() -> int:
    """1 on any miss, 2 for wrong flags and for a cluster that does not start."""
    parser = Parser(
        prog=PROGRAM,
        description="A cluster is broken in every way at every step of a request's life, and no client may notice.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return status_of(lambda: run_session(options_from(parser.parse_args())), PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
