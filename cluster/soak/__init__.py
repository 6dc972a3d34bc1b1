"""`twostroke soak`: random faults under mixed load for as long as it is told; whatever is lost, left or grows is named.

    options     the flags, checked once
    memory      how much the processes hold, over time: pure
    session     load and faults until the time is over; a line a minute
    report      the section of docs/faults.md: pure

Cluster, clients, faults and checks are those of `twostroke faults`. Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from cluster.soak import options

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = """The exit status is 1 if any stream was wrong, anything was left behind, did not come back, or grew.

examples:
  twostroke soak --for 1h --seed 3 --write docs/faults.md
  twostroke soak --for 90s
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 on any miss. Raises ServeError for bad flags and for a cluster that does not start."""
    checked = options.options_from(args)
    from cluster.soak.session import run_session

    return run_session(checked)
