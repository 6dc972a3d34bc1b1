"""Tells the router a client's address in the path of the connecting Unix socket, which only its own user can bind.

The path of a Unix socket has 107 bytes at most. So the name is short: 24 characters for an IPv6 address.
"""

from __future__ import annotations

import base64
import socket
import struct
from urllib.parse import unquote

SEPARATOR = "~"


def socket_path(backend: str, host: str, port: int) -> str:
    """Returns the path to which the socket of a client's connection is bound before it connects to `backend`."""
    address = host.partition("%")[0]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    return f"{backend}{SEPARATOR}{base64.urlsafe_b64encode(packed + struct.pack('>H', port)).decode()}"


def client_host(peer: str) -> str:
    """Returns the address of the client, without its port. `peer` is the name that gRPC gives it."""
    name = unquote(peer)
    if SEPARATOR not in name:
        return name.partition(":")[2].rpartition(":")[0].strip("[]")
    packed = base64.urlsafe_b64decode(name.rpartition(SEPARATOR)[2])[:-2]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
