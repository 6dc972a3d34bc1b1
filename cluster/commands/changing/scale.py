"""`twostroke scale`: sets the number of workers of each role, or lets the planner decide again."""

from __future__ import annotations

import argparse
import json

from cluster.clients import supervisor_access as supervisor
from cluster.values.worker_counts import ScalingStatus
from twostroke.base.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: as many as now)")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers (default: as many as now)")
    parser.add_argument("--auto", action="store_true", help="the planner decides again, between --min-* and --max-*")
    parser.add_argument("--json", action="store_true", help="as JSON instead of lines")
    supervisor.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    says_counts = args.prefill is not None or args.decode is not None
    if args.auto and says_counts:
        raise ConfigError("--auto excludes --prefill and --decode: the planner decides", field="--auto")
    if says_counts or args.auto:
        status = supervisor.ask(args, "scale", prefill=args.prefill, decode=args.decode, automatic=args.auto)
    else:
        status = supervisor.ask(args, "scaling")
    if args.json:
        print(json.dumps(status))
    else:
        print("\n".join(ScalingStatus(**status).lines()))
    return 0
