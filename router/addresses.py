"""Addresses at which a router listens (HOST:PORT each), and its listening sockets for clients."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from twostroke.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Addresses:
    http: str
    grpc: str
    admin: str
    metrics: str
    """The address of /metrics. It is `http` if metrics have no port of their own."""


def reachable(address: str) -> str:
    """Returns the address at which a client on this machine reaches a server that listens on `address`."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::", "") else address


BACKLOG = 2048
"""Most connections that wait in the kernel to be accepted."""


def bind_listener(host: str, port: int, flag: str = "--http-port", *, shares_port: bool = False) -> socket.socket:
    """Opens a listening socket. `shares_port`: other processes of the same user may share the port."""
    listener = _bound(host, port, flag, shares_port=shares_port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, flag, error) from error
    listener.setblocking(False)
    return listener


def hold_port(host: str, port: int, flag: str) -> socket.socket:
    """Binds a port for other processes of this user that share it. It does not listen, so it gets no connections."""
    return _bound(host, port, flag, shares_port=True)


def _bound(host: str, port: int, flag: str, *, shares_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With IPPROTO_TCP, which connections inherit, asyncio sets TCP_NODELAY for them; without it, it does not.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares_port))
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, flag, error) from error
    return bound


def _cannot_listen(host: str, port: int, flag: str, error: OSError) -> ConfigError:
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ConfigError(f"cannot listen on {shown} ({flag}): {error.strerror}", field=flag)


def inherited(descriptor: int, field: str) -> socket.socket:
    """Returns the listening socket of a descriptor. Raises ConfigError that names the field of RouterConfig."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(
            f"descriptor {descriptor} is not a listening socket: {error.strerror}", field=field
        ) from error
