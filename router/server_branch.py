"""The interface of a router's branches, its optional features.

`router/branches.py` is the table of them. The server uses all through this interface, and knows none by name.
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
    """Calls to the supervisor, which keeps state for all routers. Each call has a connection of its own."""

    address: str
    membership: Membership

    async def ask(self, stub: Callable[[Any], Any], method: str, request: Message, timeout_s: float) -> Any:
        """Returns the reply. Raises what the supervisor raises, or PeerLost while it cannot be reached."""
        channel = PeerChannel(self.address, self.membership)
        try:
            return await channel.call(getattr(stub(channel.channel), method), request, timeout_s)
        finally:
            await channel.close()


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What a branch may use of its router."""

    config: RouterConfig
    handler: RequestHandler
    calls: AuthenticatedCalls
    supervisor: SupervisorCalls
    recorder: Recorder
    router_id: str


class RouterBranch:
    """One optional feature of a router. It adds only what it overrides."""

    services: Sequence[str] = ()
    """Full names of its gRPC services on the clients' port."""
    open_methods: Sequence[str] = ()
    """Methods of these services that need no API key."""
    pages: Sequence[ClientPage] = ()
    """HTTP pages for clients."""
    operators: Sequence[OperatorCall] = ()
    """HTTP calls for operators, with the cluster's token."""
    routes: Sequence[Route] = ()
    """Further HTTP routes."""

    def __init__(self, parts: RouterParts) -> None:
        """Makes the branch before the router serves."""

    def serve(self, rpc: RpcServer) -> None:
        """Adds `services` to the clients' port."""

    def leave(self) -> None:
        """Ends calls on the clients' port for which nothing is to be done: it takes no new ones. It may come again."""

    def administer(self, rpc: RpcServer) -> None:
        """Adds its gRPC services to the admin port."""

    async def open(self) -> None:
        """Prepares the branch, just before the router serves."""


RouterTable = tuple[type[RouterBranch], ...]
