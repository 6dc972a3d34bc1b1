"""`twostroke faults`: a cluster is broken in every way at every step of a request's life, and no client may notice.

    options         the flags, checked once
    trials          which faults, in which order: pure
    load            what clients ask meanwhile: pure
    client          clients that go on at the other router
    answer          what they got, and what is wrong with it: pure
    testbed         the cluster: a `twostroke serve` of our own
    process_table   its processes, as the kernel shows them
    stimuli         what has to happen for some points to be reached
    head            Ray's head, killed or frozen, and started again
    zombies         streams that go on elsewhere when what was frozen comes back
    rest            whether anything is left of requests that are over
    play            one fault after the other
    outcome         what came of one
    bounds          how long clients may wait: pure
    session         clusters one after the other, progress, JSON
    report          the tables of docs/faults.md: pure

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from cluster.faults import options

EPILOG = """The exit status is 1 if anything was lost, left behind or not reached. Ctrl-C stops the cluster, too.

examples:
  twostroke faults --write docs/faults.md
  twostroke faults --only "decode/pull.*/kill" --transports tcp --seed 7
  twostroke faults --model smollm2-135m --dtype float32 --sample 10 --write docs/faults.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 on any miss. Raises ServeError for bad flags and for a cluster that does not start."""
    checked = options.options_from(args)
    from cluster.faults.session import run_session

    return run_session(checked)
