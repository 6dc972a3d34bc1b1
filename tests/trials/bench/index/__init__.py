"""`python -m tests.trials.bench index`: how fast the router's prefix index answers and learns, and what it weighs.

    options     the flags, checked once
    content     which worker holds what, and what is asked: pure, seeded
    subjects/   what is measured behind one small interface: our index, Dynamo's radix tree
    trial       one subject in a process of its own: `python -m tests.trials.bench.index.trial`
    session     a trial per subject, each with its interpreter; table, ratios, JSON

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.index import options

EPILOG = """Each index learns the same blocks from serialized events, as from a worker, and is asked the same questions;
a wrong answer fails the run. Memory is what the process grew by, over the number of (block, holder). Times are those
of this machine as it is now: compare within one run.

To measure beside Dynamo's radix tree, give it an environment of its own:
  python -m venv dynamo && dynamo/bin/pip install ai-dynamo-runtime
  python -m tests.trials.bench index --dynamo-python dynamo/bin/python
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags and for a subject that cannot be measured."""
    checked = options.options_from(args)
    from tests.trials.bench.index.session import run_session

    return run_session(checked)
