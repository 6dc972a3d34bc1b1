"""Finds, for commands, the address of a router's admin port and the cluster's token, which is on no command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from cluster.clients import state_file
from cluster.flags.checks import is_host_port
from cluster.flags.parser import add_pid
from cluster.flags.token import read as read_token
from router.addresses import reachable
from twostroke.base.credentials import TOKEN_VARIABLE, prove
from twostroke.base.errors import ConfigError, PeerLost
from twostroke.rpc.channel import error_of
from twostroke.rpc.proof import proving_channel
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

TOKEN_FILE = "token"
"""File in the launcher's folder that its user alone may read."""
RAY_TOKEN_FILE = "ray.token"
"""File in the same folder with the token of a local Ray."""

ANSWER_S = 5.0
"""Seconds for a router to say what it is."""


@dataclass(frozen=True, slots=True)
class AdminAccess:
    addresses: tuple[str, ...]
    """Addresses of the routers' admin ports."""
    token: str = field(repr=False)
    """The cluster's token, which calls prove and do not send; empty where it is not known."""

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """Opens a channel to a router's admin port, whose calls prove that they have the token."""
        return proving_channel(address, self.token, options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--admin",
        metavar="HOST:PORT",
        help=f"admin port of one router; the file that {TOKEN_VARIABLE} names holds the token (default: all routers of "
        "this user's local server)",
    )
    add_pid(parser)


def access_from(args: argparse.Namespace) -> AdminAccess:
    """Returns the access for the given flags. Raises ConfigError or NotFound that says what is missing."""
    if args.admin is not None:
        if not is_host_port(args.admin):
            raise ConfigError(
                f"--admin must be HOST:PORT of a router's admin port, got {args.admin!r}", field="--admin"
            )
        address = reachable(args.admin)
        return AdminAccess((address,), _token_for(address))
    return access_to(state_file.the_one_running(args.pid))


def access_to(state: state_file.ServeState) -> AdminAccess:
    """Returns the access to a server of this user."""
    return AdminAccess(tuple(reachable(router.admin) for router in state.routers), _local_token(state))


def write_token(folder: Path, token: str) -> None:
    """Writes the cluster's token into a file that this user alone may read."""
    _write(folder / TOKEN_FILE, token)


def write_ray_token(folder: Path, token: str) -> Path:
    """Writes the token of a local Ray, which does not tell the cluster's: Ray sends its own with every call."""
    path = folder / RAY_TOKEN_FILE
    _write(path, prove(token, "ray").hex())
    return path


def _write(path: Path, secret: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secret)


def _local_token(state: state_file.ServeState) -> str:
    path = Path(state.log_dir) / TOKEN_FILE
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"the cluster's token cannot be read from {path}: {error.strerror}") from error


def _token_for(address: str) -> str:
    """Returns the token that the environment names, else that of this user's server at the address, else nothing.

    A token is not proved to another cluster.
    """
    if path := os.environ.get(TOKEN_VARIABLE):
        return read_token(path)
    for state in state_file.running():
        if address in (reachable(router.admin) for router in state.routers):
            return _local_token(state)
    return ""


def router_info(address: str, access: AdminAccess) -> control_pb2.ServerInfo:
    """Returns what the router at an admin port says about itself. Raises grpc.RpcError where it does not answer."""
    with access.channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        return stub.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=ANSWER_S)


def status_of(error: grpc.RpcError) -> grpc.StatusCode:
    return cast(grpc.Call, error).code()


def describe(error: grpc.RpcError) -> str:
    return f"{status_of(error).name}: {cast(grpc.Call, error).details()}"


def first_answer(
    access: AdminAccess, stub: Callable[[grpc.Channel], Any], method: str, request: Message, timeout_s: float
) -> Any:
    """Returns the first router's response. Raises the ServeError that it raised, or PeerLost where none answers."""
    failures: list[PeerLost] = []
    for address in access.addresses:
        with access.channel(address) as channel:
            try:
                return getattr(stub(channel), method)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                cause = error_of(cast(grpc.aio.AioRpcError, error), address)
                if not isinstance(cause, PeerLost):
                    raise cause from error
                failures.append(cause)
    raise PeerLost("; ".join(failure.message for failure in failures))
