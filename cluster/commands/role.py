"""`twostroke role`: a worker becomes the other role, in its process, with what it has loaded and cached."""

from __future__ import annotations

import argparse

from cluster.commands import supervisor
from twostroke.config import Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="as `twostroke status` names it")
    parser.add_argument("role", choices=[Role.PREFILL.value, Role.DECODE.value])
    supervisor.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    supervisor.ask(args, "assign_role", worker_id=args.worker, role=args.role)
    print(f"{args.worker} serves as a {args.role} worker; counts stay as they are until: twostroke scale --auto")
    return 0
