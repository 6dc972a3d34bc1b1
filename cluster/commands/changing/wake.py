"""`twostroke wake`: a worker that is asleep loads its model and serves again."""

from __future__ import annotations

import argparse

from cluster.clients import supervisor_access


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="a worker that was put to sleep with `twostroke sleep`")
    supervisor_access.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    supervisor_access.ask(args, "wake_up", worker_id=args.worker)
    print(f"{args.worker} serves again")
    return 0
