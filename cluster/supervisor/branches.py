"""The table of what the supervisor keeps for the fleet besides its workers: one line for each."""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from cluster.supervisor.adapters import NamedAdapters
from cluster.supervisor.backend import MessageStore
from cluster.supervisor.fleet import SupervisedFleet
from cluster.supervisor.pins.service import FleetPins
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import fleet_pb2


class SupervisorBranch(Protocol):
    service: str
    """Name of the service by which routers reach it."""

    def add_to(self, server: grpc.aio.Server) -> None: ...

    def add_to_view(self, view: fleet_pb2.FleetView) -> None:
        """Adds what every watcher of the fleet is to know."""

    async def begun(self, worker_id: str) -> None:
        """Brings to a worker that has begun to serve what it is to have."""

    async def stop(self) -> None:
        """Ends what is under way; nothing is stored afterwards."""


def branches_of(fleet: SupervisedFleet, store: MessageStore, membership: Membership) -> tuple[SupervisorBranch, ...]:
    return (FleetPins.of(fleet, store, membership), NamedAdapters.of(fleet, store, membership))
