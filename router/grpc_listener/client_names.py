"""How a router is told whose connection it serves: by the path of the Unix socket, which only its user can choose."""

from __future__ import annotations

from urllib.parse import unquote

SEPARATOR = "~"


def socket_path(backend: str, host: str, port: int) -> str:
    """Returns the path to which the socket of a client's connection is bound before it connects to `backend`."""
    return f"{backend}{SEPARATOR}{host}:{port}"


def client_host(peer: str) -> str:
    """Returns the address of the client, without its port. `peer`: what gRPC calls it."""
    name = unquote(peer)
    _, _, address = name.rpartition(SEPARATOR) if SEPARATOR in name else name.partition(":")
    return address.rpartition(":")[0].strip("[]")
