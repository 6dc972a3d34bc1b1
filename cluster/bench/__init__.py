"""`twostroke bench`: load against an OpenAI-compatible endpoint or our gRPC, measured at the client's end of the wire.

    options     the flags, checked once
    load        which requests at which times: pure, seeded    trace   the same, from a recorded trace
    clients     http_client + openai_stream, grpc_client: one request in, one Answer of clock readings out
    drive       sends the plan: open loop or fixed concurrency
    measure     records to percentiles: pure                   report  percentiles to a table and JSON

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from cluster.bench.options import add_arguments, options_from

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """0, or 1 if every request failed. Raises ServeError for bad flags, files and endpoints."""
    options = options_from(args)
    from cluster.bench.session import run_session

    return run_session(options)
