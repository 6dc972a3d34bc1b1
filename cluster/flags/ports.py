"""Where workers and the Fleet service listen: fixed where firewalls, Services or other pods name the ports."""

from __future__ import annotations

import argparse

from twostroke.config import ClusterConfig
from twostroke.placement_config import WorkerPorts

DEFAULTS = ClusterConfig()


def add_fleet(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--fleet-port",
        type=int,
        default=DEFAULTS.fleet_port,
        metavar="PORT",
        help="Fleet service, on the node of Ray's head; routers elsewhere need it (default: any free one)",
    )


def add_workers(parser: argparse._ActionsContainer) -> None:
    for name, what in (("rpc", "rpc"), ("pages", "pages over tcp"), ("metrics", "Prometheus metrics")):
        parser.add_argument(
            f"--worker-{name}-port",
            type=int,
            default=getattr(DEFAULTS.ports, name),
            metavar="PORT",
            help=f"{what} of every worker: for one worker per node or pod (default: any free one)",
        )


def config_from(args: argparse.Namespace) -> WorkerPorts:
    return WorkerPorts(rpc=args.worker_rpc_port, pages=args.worker_pages_port, metrics=args.worker_metrics_port)
