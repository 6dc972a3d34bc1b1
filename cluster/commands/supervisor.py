"""How commands reach the supervisor: over the launcher that serves here, or on the Ray cluster of `--address`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster import orders, ray_environment, state_file
from cluster.flags import pid
from cluster.ray_address import reachable
from twostroke.errors import PeerLost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pid.add(parser)
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="ask the fleet on this Ray cluster, without its launcher"
    )


def folder(args: argparse.Namespace) -> Path:
    """Of the launcher that is meant."""
    return Path(state_file.the_one_running(args.pid).log_dir)


def ask(args: argparse.Namespace, order: str, **fields: object) -> Any:
    """What the method of that name of `Supervisor` returns. Raises what it raises, or PeerLost."""
    if args.address is None:
        return orders.give(folder(args), order, **fields)
    address = reachable(args.address)
    ray_environment.for_joined_cluster()
    # Only now: Ray reads its environment when it is imported.
    import ray

    from cluster import ray_session

    ray_session.join(address)
    try:
        return ray.get(getattr(ray_session.find_supervisor(), order).remote(**fields))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise PeerLost(f"the supervisor at {address} does not answer: {error}") from error
    finally:
        ray_session.leave()
