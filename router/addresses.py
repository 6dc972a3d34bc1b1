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
