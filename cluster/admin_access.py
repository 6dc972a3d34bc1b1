"""How commands reach a router's admin port: its address, and the cluster's token, which is never on a command line."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from cluster import state_file
from cluster.checks import is_host_port
from cluster.flags import pid
from cluster.flags.token import read as read_token
from router.addresses import reachable
from twostroke.credentials import TOKEN_VARIABLE
from twostroke.errors import ConfigError
from twostroke.rpc.server import TOKEN_KEY

LOCAL_TOKEN = "token"
"""In the launcher's folder, for its user alone."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AdminAccess:
    addresses: tuple[str, ...]
    """Admin ports of a cluster's routers."""
    metadata: Metadata
    """Of every call there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--admin",
        metavar="HOST:PORT",
        help=f"admin port of one router, with the cluster's token in the file that {TOKEN_VARIABLE} names (default: "
        "those of this user's local server)",
    )
    pid.add(parser)


def access_from(args: argparse.Namespace) -> AdminAccess:
    """Raises ConfigError or NotFound that says what is missing."""
    if args.admin is not None:
        if not is_host_port(args.admin):
            raise ConfigError(
                f"--admin must be HOST:PORT of a router's admin port, got {args.admin!r}", field="--admin"
            )
        address = reachable(args.admin)
        return AdminAccess((address,), _metadata(_token_for(address)))
    return access_to(state_file.the_one_running(args.pid))


def access_to(state: state_file.ServeState) -> AdminAccess:
    """Of a server of this user."""
    return AdminAccess(tuple(reachable(router.admin) for router in state.routers), _metadata(_local_token(state)))


def write_token(folder: Path, token: str) -> Path:
    """Write the cluster's token into a file that this user alone may read."""
    path = folder / LOCAL_TOKEN
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token)
    return path


def _local_token(state: state_file.ServeState) -> str:
    path = Path(state.log_dir) / LOCAL_TOKEN
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"the cluster's token cannot be read from {path}: {error.strerror}") from error


def _token_for(address: str) -> str:
    """That of the environment, else of this user's server there: one cluster's token is not for others to see."""
    if path := os.environ.get(TOKEN_VARIABLE):
        return read_token(path)
    for state in state_file.running():
        if address in (reachable(router.admin) for router in state.routers):
            return _local_token(state)
    return ""


def _metadata(token: str) -> Metadata:
    return ((TOKEN_KEY, token),) if token else ()
