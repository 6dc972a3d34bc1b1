"""`python -m tests.chaos.soak`: flags, and the exit status."""

from __future__ import annotations

import argparse
import sys

from cluster.cli import status_of
from cluster.flags.parser import Parser
from tests.chaos.soak.options import add_arguments, options_from
from tests.chaos.soak.session import run_session

PROGRAM = "python -m tests.chaos.soak"
EPILOG = """The exit status is 1 if any stream was wrong, anything was left behind, did not come back, or grew.

examples:
  python -m tests.chaos.soak --for 1h --seed 3 --write docs/faults.md
  python -m tests.chaos.soak --for 90s
"""


def main() -> int:
    """1 on any miss, 2 for wrong flags and for a cluster that does not start."""
    parser = Parser(
        prog=PROGRAM,
        description="Random faults under mixed load for as long as it is told; what is lost, left or grows is named.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return status_of(lambda: run_session(options_from(parser.parse_args())), PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
