"""`twostroke bench goodput`: the highest rate at which enough requests are as fast as was promised.

    options   the flags, checked once
    trial     one rate at one server, and its requests against the promise, as soon as it is decided
    session   trials at several servers in turns, table, JSON

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tools.bench.goodput.options import add_arguments, options_from

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = """examples:
  twostroke bench goodput http://127.0.0.1:8000 --slo-ttft 3 --slo-itl 80
  twostroke bench goodput URL_A URL_B --names ours,other --prompt-tokens 1024 --output-tokens 128 --duration 60
"""


def run(args: argparse.Namespace) -> int:
    """0, or 1 if some endpoint keeps the promise at no rate. Raises ServeError for bad flags and endpoints."""
    options = options_from(args)
    from tools.bench.goodput.session import run_session

    return run_session(options)
