"""`python -m tests.trials.bench cores`: one prefill and one decode worker on two shared cores, and the simulator beside
them.

    options   the flags, checked once
    trial     one real cluster: a profile under load, then one load after the other
    session   the simulator on the same arrivals, a table, JSON

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.shared_cores import options

EPILOG = """The cluster is this machine's, with the defaults of `serve` and whatever flags follow `--`. Its steps are
profiled under one load; then every load of --rates is measured by a client, and simulated by a fleet that was fitted
to the profile and to the answers that were given meanwhile. So the simulator has seen nothing of what it is held to.

examples:
  python -m tests.trials.bench cores
  python -m tests.trials.bench cores --rates 0.8,2 --requests 30 --json cores.json -- --no-borrow
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if a ratio is beyond --within. Raises ServeError for bad flags and for a cluster that does not start."""
    checked = options.options_from(args)
    from tests.trials.bench.shared_cores.session import run_session

    return run_session(checked)
