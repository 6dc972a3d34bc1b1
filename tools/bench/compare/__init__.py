"""`twostroke bench compare`: the same loads against several servers, in turns, and what one is over the other.

    options   the flags, checked once        scenario  a load's name to its requests: pure
    rounds    who is asked when, and asking
    report    ratios with their spread, as a table and JSON
    page      the same with figures, as one HTML file

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tools.bench.compare.options import add_arguments, options_from

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = """examples:
  twostroke bench compare http://127.0.0.1:8000 http://127.0.0.1:8001 --names ours,other --html report.html
  twostroke bench compare URL_A URL_B,text,no-ignore-eos --load 1024x128@c4 --load shared:1056/1024x128x16 --rounds 5
"""


def run(args: argparse.Namespace) -> int:
    """0, or 1 if some endpoint completed no request of some load. Raises ServeError for bad flags and endpoints."""
    options = options_from(args)
    from tools.bench.compare.session import run_session

    return run_session(options)
