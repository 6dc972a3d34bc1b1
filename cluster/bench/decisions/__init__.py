"""`twostroke bench decisions`: how long the router thinks about one request, in a fleet as large as asked for.

Half of the workers prefill and half decode. Their caches are those of `bench index`, their loads are drawn; what is
timed is everything between a request with named blocks and its reservation: look, choose, reserve.

    options  the flags, checked once        measure  an index, a fleet, and many decisions: rows of times

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from cluster.bench.decisions.options import add_arguments, options_from

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = (
    """Times are those of this machine as it is now. The index is filled first: a million blocks take some seconds."""
)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags."""
    options = options_from(args)
    from cluster.bench.decisions.measure import run_session

    return run_session(options)
