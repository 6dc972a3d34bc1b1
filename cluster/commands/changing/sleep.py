"""`twostroke sleep`: a worker hands over its requests and frees its memory; its process waits to be woken."""

from __future__ import annotations

import argparse

from cluster.clients import supervisor_access
from cluster.commands.changing.drain import add_common_arguments, check_deadline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="as `twostroke status` names it")
    parser.add_argument("--force", action="store_true", help="even the last worker of its role")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_deadline(args.deadline)
    supervisor_access.ask(args, "sleep", worker_id=args.worker, deadline_s=args.deadline, force=args.force)
    print(f"{args.worker} is asleep; it serves again with: twostroke wake {args.worker}")
    return 0
