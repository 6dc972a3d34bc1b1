"""`python -m tests.trials.bench host`: processor time that router and decode worker spend on each token, beside the
model.

The model only waits (`paced:`), the processes are those that `serve` starts, and the streams are read over sockets.

    options  the flags, checked once        streams  clients that count the tokens that come, over HTTP or gRPC
    measure  a cluster per number of streams, and processor time over tokens: rows

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.host_cost import options

EPILOG = """examples:
  python -m tests.trials.bench host
  python -m tests.trials.bench host --streams 200 --protocol grpc --seconds 20 --json host.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    from tests.trials.bench.host_cost.measure import run_session

    return run_session(checked)
