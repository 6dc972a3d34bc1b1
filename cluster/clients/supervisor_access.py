"""How commands reach the supervisor: through the launcher on this host, or on the Ray cluster of `--address`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.clients import control_socket, state_file
from cluster.flags.parser import add_pid
from cluster.ray import environment as ray_environment
from cluster.ray.address import ray_head_address
from twostroke.base.errors import PeerLost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pid(parser)
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="ask the fleet on this Ray cluster, without its launcher"
    )


def folder(args: argparse.Namespace) -> Path:
    """Returns the folder of the launcher that is meant."""
    return Path(state_file.the_one_running(args.pid).log_dir)


def ask(args: argparse.Namespace, method: str, *, wait_s: float = 0.0, **fields: object) -> Any:
    """Returns what this method of `Supervisor` returns. Raises what it raises, or PeerLost.

    `wait_s`: how long to wait for a head of Ray that does not answer yet.
    """
    if args.address is None:
        return control_socket.send(folder(args), method, **fields)
    address = ray_head_address(args.address, wait_s)
    ray_environment.for_joined_cluster()
    # Imported here, because Ray reads its environment when it is imported.
    import ray

    from cluster.ray import session as ray_session

    ray_session.join(address)
    try:
        return ray.get(getattr(ray_session.find_supervisor(), method).remote(**fields))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise PeerLost(f"the supervisor at {address} does not answer: {error}") from error
    finally:
        ray_session.leave()
