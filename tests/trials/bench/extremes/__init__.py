"""`python -m tests.trials.bench extremes`: how late other streams come beside extreme schemas, where they compile and
run.

On a router, all of `outputs.EXTREME` are compiled again and again; what is measured is how late its event loop is. On a
decode worker with a real model, answers follow `outputs.HOSTILE`, whose masks take as long as any may; what is measured
are the gaps between tokens of other streams. Rounds beside extreme ones, beside as many ordinary ones, and beside those
and a process that computes take turns: on few cores any computation delays streams, and that is none of ours.

    options  the flags, checked once        outputs  what is compiled, and what answers follow
    router   lateness of a router's loop    streams  gaps of streams on a decode worker
    measure  rounds by turns: rows of milliseconds

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.extremes import options

EPILOG = """Compare rows: each is beside the others under the same load of the machine.

examples:
  python -m tests.trials.bench extremes
  python -m tests.trials.bench extremes --rounds 6 --seconds 20 --parts worker --json extremes.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ServeError for bad flags and for a model that is not on this machine."""
    checked = options.options_from(args)
    from tests.trials.bench.extremes.measure import run_session

    return run_session(checked)
