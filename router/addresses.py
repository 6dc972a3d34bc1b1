"""Where a router listens: HOST:PORT each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Addresses:
    http: str
    grpc: str
    """Of clients, as the one before."""
    admin: str
    metrics: str
    """That of `http` where metrics have no port of their own."""


def reachable(address: str) -> str:
    """How a client on this machine reaches what listens on `address`."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::", "") else address
