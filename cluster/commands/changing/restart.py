"""`twostroke restart`: restarts workers, routers and the supervisor, one at a time, while they are used."""

from __future__ import annotations

import argparse

from cluster.clients import control_socket
from cluster.clients.supervisor_access import folder
from cluster.commands.changing.drain import add_common_arguments, drain
from cluster.values.spec import SUPERVISOR
from twostroke.base.errors import ConfigError, InvalidRequest, NotFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"a worker (also one that was drained), router-N or {SUPERVISOR}"
    )
    parser.add_argument("--all", action="store_true", help="every process: workers, routers, supervisor")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.all == bool(args.names):
        raise ConfigError("name what is to be restarted, or say --all", field="--all")
    if args.address is not None:
        return _restart_workers(args)
    known = control_socket.send(folder(args), "processes")
    everything = [*known["workers"], *known["routers"], SUPERVISOR]
    unknown = [name for name in args.names if name not in everything]
    if unknown:
        raise NotFound(f"there is no {', '.join(unknown)}; there are {', '.join(everything)}")
    for name in everything if args.all else args.names:
        if name in known["workers"]:
            try:
                drain(args, name, restart=True)
            except NotFound:
                if not args.all:
                    raise
                print(f"{name} has retired meanwhile", flush=True)
                continue
            except InvalidRequest as error:
                if not args.all:
                    raise
                print(error.message, flush=True)
                continue
        elif name in known["routers"]:
            control_socket.send(folder(args), "restart_router", name=name)
        else:
            control_socket.send(folder(args), "restart_supervisor")
        print(f"{name} serves again", flush=True)
    return 0


def _restart_workers(args: argparse.Namespace) -> int:
    """Restarts workers only: routers belong to the launcher, which is not asked."""
    if args.all:
        raise ConfigError("--address knows workers only: name them", field="--address")
    for name in args.names:
        drain(args, name, restart=True)
        print(f"{name} serves again", flush=True)
    return 0
