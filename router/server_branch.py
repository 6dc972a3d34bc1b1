"""The port of a router's branches: what a feature may give the router that it is wired into.

`router/branches.py` is the table, with one line for a branch. The server asks all of them, and knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from starlette.routing import Route

from router.endpoints.grpc.calls import AuthenticatedCalls
from router.endpoints.openapi import ClientPage, OperatorCall
from router.requests.request_handler import RequestHandler
from twostroke.config import RouterConfig
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.tracing.recorder import Recorder


@dataclass(frozen=True, slots=True)
class SupervisorCalls:
    """Calls of the process that remembers for all routers, over a connection for each."""

    address: str
    membership: Membership

    async def ask(self, stub: Callable[[Any], Any], method: str, request: Message, timeout_s: float) -> Any:
        """Raises what the supervisor raises, or PeerLost while it is away."""
        channel = PeerChannel(self.address, self.membership)
        try:
            return await channel.call(getattr(stub(channel.channel), method), request, timeout_s)
        finally:
            await channel.close()


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What the branches of a router are made of."""

    config: RouterConfig
    handler: RequestHandler
    calls: AuthenticatedCalls
    supervisor: SupervisorCalls
    recorder: Recorder
    router_id: str


class RouterBranch:
    """One feature of a router. It gives nothing but what it overrides."""

    services: Sequence[str] = ()
    """gRPC services on the clients' port, by their full names."""
    open_methods: Sequence[str] = ()
    """Methods of them that need no API key."""
    pages: Sequence[ClientPage] = ()
    """HTTP pages for clients."""
    operators: Sequence[OperatorCall] = ()
    """HTTP calls that take the cluster's token."""
    routes: Sequence[Route] = ()
    """Other routes than those of clients."""

    def __init__(self, parts: RouterParts) -> None:
        """Makes the branch before the router serves."""

    def serve(self, rpc: RpcServer) -> None:
        """Adds `services` to the clients' port."""

    def administer(self, rpc: RpcServer) -> None:
        """Adds its services to the admin port."""

    async def open(self) -> None:
        """Does what has to be done before the router serves."""


RouterTable = tuple[type[RouterBranch], ...]
