"""The port of a router's branches: what a feature may give the router that it is wired into.

`router/branches.py` is the table, with one line for a branch. The server asks all of them, and knows none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.routing import Route

from router.endpoints.openapi import OperatorCall
from router.requests.request_handler import RequestHandler
from twostroke.config import RouterConfig
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.tracing.recorder import Recorder


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What the branches of a router are made of."""

    config: RouterConfig
    handler: RequestHandler
    membership: Membership
    recorder: Recorder
    router_id: str


class RouterBranch:
    """One feature of a router. It gives nothing but what it overrides."""

    operators: Sequence[OperatorCall] = ()
    """HTTP calls that take the cluster's token."""
    routes: Sequence[Route] = ()
    """Other routes than those of clients."""

    def __init__(self, parts: RouterParts) -> None:
        """Makes the branch before the router serves."""

    def administer(self, rpc: RpcServer) -> None:
        """Adds its services to the admin port."""

    async def open(self) -> None:
        """Does what has to be done before the router serves."""


RouterTable = tuple[type[RouterBranch], ...]
