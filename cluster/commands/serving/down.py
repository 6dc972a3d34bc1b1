"""`twostroke down`: ends a local server, or a fleet on a Ray cluster."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from cluster.clients import state_file
from cluster.flags.parser import add_pid
from cluster.ray import environment as ray_environment
from cluster.ray.address import ray_head_address
from twostroke.base.errors import PeerLost

POLL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pid(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to wait until the server has ended (default: %(default)s)",
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="remove the fleet on this Ray cluster, if its launcher is gone"
    )


def run(args: argparse.Namespace) -> int:
    if args.address is not None:
        return _remove_fleet(args.address, args.timeout)
    return _stop_server(state_file.the_one_running(args.pid), args.timeout)


def _stop_server(state: state_file.ServeState, timeout_s: float) -> int:
    os.kill(state.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    while state_file.started_ticks(state.pid) == state.started_ticks:
        if time.monotonic() > deadline_s:
            print(f"twostroke: {state.pid} has not ended after {timeout_s:.0f} s", file=sys.stderr)
            return 1
        time.sleep(POLL_S)
    print(f"stopped {state.pid} ({state.endpoints})")
    return 0


def _remove_fleet(address: str, timeout_s: float) -> int:
    address = ray_head_address(address)
    ray_environment.for_joined_cluster()
    # Imported here, because Ray reads its environment when it is imported.
    import ray

    from cluster.ray import session as ray_session

    ray_session.join(address)
    try:
        supervisor = ray_session.find_supervisor()
        try:
            ray.get(supervisor.stop.remote(), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise PeerLost(f"the supervisor at {address} does not answer: {error}") from error
        ray_session.remove(supervisor)
    finally:
        ray_session.leave()
    print(f"removed the fleet from {address}")
    return 0
