"""Which one of this user's running servers a command means."""

from __future__ import annotations

import argparse


def add(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="of the `twostroke serve` that is meant, if several are running"
    )
