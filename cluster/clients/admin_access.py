"""Finds, for commands, the address of a router's admin port and the cluster's token, which is on no command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from cluster.flags.checks import is_host_port
from cluster.flags.parser import add_pid
from cluster.flags.token import read as read_token
from cluster.launch import state_file
from router.addresses import reachable
from twostroke.credentials import TOKEN_VARIABLE
from twostroke.errors import ConfigError, PeerLost
from twostroke.rpc.channel import error_of
from twostroke.rpc.server import TOKEN_KEY
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

TOKEN_FILE = "token"
"""File in the launcher's folder that its user alone may read."""

ANSWER_S = 5.0
"""Seconds for a router to say what it is."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AdminAccess:
    addresses: tuple[str, ...]
    """Addresses of the routers' admin ports."""
    metadata: Metadata
    """Metadata to send with every call."""

    @property
    def token(self) -> str:
        """The cluster's token; empty where it is not known."""
        return dict(self.metadata).get(TOKEN_KEY, "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--admin",
        metavar="HOST:PORT",
        help=f"admin port of one router; the file that {TOKEN_VARIABLE} names holds the token (default: all routers of "
        "this user's local server)",
    )
    add_pid(parser)


def access_from(args: argparse.Namespace) -> AdminAccess:
    """Return the access for the given flags. Raises ConfigError or NotFound that says what is missing."""
    if args.admin is not None:
        if not is_host_port(args.admin):
            raise ConfigError(
                f"--admin must be HOST:PORT of a router's admin port, got {args.admin!r}", field="--admin"
            )
        address = reachable(args.admin)
        return AdminAccess((address,), _metadata(_token_for(address)))
    return access_to(state_file.the_one_running(args.pid))


def access_to(state: state_file.ServeState) -> AdminAccess:
    """Return the access to a server of this user."""
    return AdminAccess(tuple(reachable(router.admin) for router in state.routers), _metadata(_local_token(state)))


def write_token(folder: Path, token: str) -> Path:
    """Write the cluster's token into a file that this user alone may read."""
    path = folder / TOKEN_FILE
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token)
    return path


def _local_token(state: state_file.ServeState) -> str:
    path = Path(state.log_dir) / TOKEN_FILE
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"the cluster's token cannot be read from {path}: {error.strerror}") from error


def _token_for(address: str) -> str:
    """Return the token that the environment names, else that of this user's server at the address, else nothing.

    A token is not sent to another cluster.
    """
    if path := os.environ.get(TOKEN_VARIABLE):
        return read_token(path)
    for state in state_file.running():
        if address in (reachable(router.admin) for router in state.routers):
            return _local_token(state)
    return ""


def _metadata(token: str) -> Metadata:
    return ((TOKEN_KEY, token),) if token else ()


def router_info(address: str, access: AdminAccess) -> control_pb2.ServerInfo:
    """Return what the router at an admin port says of itself. Raises grpc.RpcError where it does not answer."""
    with grpc.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        return stub.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=ANSWER_S, metadata=access.metadata)


def status_of(error: grpc.RpcError) -> grpc.StatusCode:
    return cast(grpc.Call, error).code()


def describe(error: grpc.RpcError) -> str:
    return f"{status_of(error).name}: {cast(grpc.Call, error).details()}"


def first_answer(
    access: AdminAccess,
    stub: Callable[[grpc.Channel], Any],
    method: str,
    request: Message,
    kind: type[Any],
    timeout_s: float,
) -> Any:
    """Return the response of the first router that answers.

    Raises the ServeError that the router raised, or PeerLost where none answers.
    """
    failures: list[PeerLost] = []
    for address in access.addresses:
        with grpc.insecure_channel(address) as channel:
            called: Callable[..., Any] = getattr(stub(channel), method)
            try:
                response = called(request, metadata=access.metadata, timeout=timeout_s)
            except grpc.RpcError as error:
                cause = error_of(cast(grpc.aio.AioRpcError, error), address)
                if not isinstance(cause, PeerLost):
                    raise cause from error
                failures.append(cause)
            else:
                assert isinstance(response, kind)
                return response
    raise PeerLost("; ".join(failure.message for failure in failures))
