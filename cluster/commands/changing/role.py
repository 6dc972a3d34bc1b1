"""`twostroke role`: switches a worker to the other role, in its process, with its model and its cache."""

from __future__ import annotations

import argparse

from cluster.clients import supervisor_access
from twostroke.config import Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="as `twostroke status` names it")
    parser.add_argument("role", choices=[Role.PREFILL.value, Role.DECODE.value])
    supervisor_access.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    supervisor_access.ask(args, "assign_role", worker_id=args.worker, role=args.role)
    print(
        f"{args.worker} serves as a {args.role} worker; the number of workers of each role stays fixed until: "
        "twostroke scale --auto"
    )
    return 0
