"""`twostroke drain`: a worker, or every worker of a Ray node, takes no new work, hands over its requests and leaves."""

from __future__ import annotations

import argparse

from cluster.clients import supervisor_access
from cluster.ray import environment as ray_environment
from cluster.ray.address import ray_head_address
from twostroke.base.errors import ConfigError

DEADLINE_S = 30.0
HEAD_WAIT_S = 10.0
"""Seconds to wait for a Ray head that does not answer yet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "worker", metavar="WORKER", nargs="?", help="name of the worker, as `twostroke status` prints it"
    )
    parser.add_argument(
        "--node",
        metavar="NODE",
        help="drain a Ray node instead: its address or id, or `here`. Its workers restart elsewhere; then the node can "
        "be stopped (needs --address)",
    )
    parser.add_argument("--restart", action="store_true", help="start it again afterwards")
    parser.add_argument("--force", action="store_true", help="drain even the last worker of its role")
    add_common_arguments(parser)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="S",
        help="seconds; requests that are open then are cut off and continue elsewhere (default: %(default)s)",
    )
    supervisor_access.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if (args.worker is None) == (args.node is None):
        raise ConfigError("name a worker, or a node with --node", field="--node")
    if args.node is not None:
        return _drain_node(args)
    left = drain(args, args.worker, args.restart, force=args.force)
    done = "serves again" if args.restart else "has left"
    cut = f"; {left} requests were cut off and continue elsewhere" if left else ""
    print(f"{args.worker} {done}{cut}")
    return 0


def drain(args: argparse.Namespace, worker: str, restart: bool, *, force: bool = False) -> int:
    """Drains a worker; returns how many requests were cut off."""
    check_deadline(args.deadline)
    fields = {"worker_id": worker, "deadline_s": args.deadline, "restart": restart, "force": force}
    return int(supervisor_access.ask(args, "drain", wait_s=min(args.deadline, HEAD_WAIT_S), **fields))


def _drain_node(args: argparse.Namespace) -> int:
    check_deadline(args.deadline)
    if args.address is None or args.restart or args.force:
        raise ConfigError(
            "--node needs --address HOST:PORT of Ray's head, and takes no --restart and no --force", field="--node"
        )
    address = ray_head_address(args.address, min(args.deadline, HEAD_WAIT_S))
    ray_environment.for_joined_cluster()
    # Imported here, because Ray reads its environment when it is imported.
    from cluster.ray.node_drain import leave_node

    left = leave_node(address, args.node, args.deadline)
    print(f"the node can be stopped; workers that left it: {', '.join(left) or 'none'}")
    return 0


def check_deadline(deadline_s: float) -> None:
    if not 0 <= deadline_s < float("inf"):
        raise ConfigError(f"--deadline must be seconds, 0 or more, got {deadline_s}", field="--deadline")
