"""Follows every other router of the fleet: what they have placed counts here too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import NoReturn

import grpc.aio

from router.reservation_messages import batch_from
from router.reservations import Reservations
from twostroke.errors import InternalError, PeerLost, ServeError
from twostroke.ids import RouterId
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import fleet_pb2, routing_pb2
from twostroke.rpc.v1.routing_pb2_grpc import RoutingStub

log = logging.getLogger(__name__)

SILENCE_S = 3.0
"""Several heartbeats of the other router's stream."""
RETRY_PAUSE_S = 0.25
"""Between two attempts to reach a router; well within the grace for what a lost one had placed."""


class ReservationFeed:
    """One task per other router, for as long as the supervisor lists it or its stream flows.

    A supervisor that starts again lists no router until each has found it: streams that flow know better.
    """

    def __init__(self, router_id: str, us: Membership, reservations: Reservations) -> None:
        self._router_id = RouterId(router_id)
        self._us = us
        self._reservations = reservations
        self._listed: set[RouterId] = set()
        self._followed: dict[RouterId, asyncio.Task[None]] = {}
        self._flowing: set[RouterId] = set()

    @property
    def flowing(self) -> int:
        """Routers whose placements come in."""
        return len(self._flowing)

    def take(self, listed: Iterable[fleet_pb2.RouterMember], tasks: asyncio.TaskGroup) -> None:
        """Follow whom the supervisor lists."""
        addresses = {RouterId(said.router_id): said.address for said in listed if said.address}
        self._listed = addresses.keys() - {self._router_id}
        for router in self._listed - self._followed.keys():
            follow = self._follow(router, addresses[router])
            self._followed[router] = tasks.create_task(follow, name=f"reservations of {router}")

    async def _follow(self, router: RouterId, address: str) -> None:
        """Until the router is gone."""
        has_failed = False
        try:
            while router in self._listed:
                error = await self._until_it_breaks(router, address)
                if router in self._flowing or not has_failed:
                    log.warning("router lost router=%s address=%s error=%s", router, address, error)
                has_failed = True
                self._flowing.discard(router)
                self._reservations.lost(router, time.monotonic())
                await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            del self._followed[router]

    async def _until_it_breaks(self, router: RouterId, address: str) -> ServeError:
        try:
            await self._apply_all(router, address)
        except grpc.aio.AioRpcError as error:
            return error_of(error, address)
        except ServeError as error:
            return error
        except Exception as error:
            log.exception("reservation feed failed router=%s", router)
            return InternalError(f"{type(error).__name__}: {error}")

    async def _apply_all(self, router: RouterId, address: str) -> NoReturn:
        """What it says, until the stream breaks; that raises."""
        channel = PeerChannel(address, self._us)
        try:
            call = RoutingStub(channel.channel).WatchReservations(
                routing_pb2.WatchReservationsRequest(router_id=self._router_id), metadata=channel.metadata
            )
            async with listening(SILENCE_S) as heard:
                while isinstance(message := await call.read(), routing_pb2.ReservationBatch):
                    heard()
                    self._reservations.apply(
                        router, batch_from(message), time.monotonic(), whole=router not in self._flowing
                    )
                    if router not in self._flowing:
                        self._flowing.add(router)
                        log.info("router joins router=%s address=%s", router, address)
            raise PeerLost(f"{address} ended its stream of reservations")
        except TimeoutError:
            raise PeerLost(f"{address} said nothing of its reservations for {SILENCE_S} s") from None
        finally:
            await channel.close()
