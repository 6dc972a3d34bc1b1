"""Exchanges reservations between routers, so that each one counts what the others have placed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc.aio

from router.routing.reservations import Reservation, ReservationChanges, Reservations, ReservedShare
from twostroke.base.errors import InternalError, PeerLost, ServeError
from twostroke.base.ids import BlockHash, RequestId, RouterId, WorkerId
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import fleet_pb2, routing_pb2, routing_pb2_grpc
from twostroke.rpc.v1.routing_pb2_grpc import RoutingStub

log = logging.getLogger(__name__)

SILENCE_S = 3.0
"""Seconds of silence after which a router counts as lost: several heartbeats of its stream."""
RETRY_PAUSE_S = 0.25
"""Seconds between two attempts to reach a router: much less than placements of a lost router count."""


class ReservationFeed:
    """Runs one task for each other router, while the supervisor lists the router or its stream works.

    A restarted supervisor lists no router until each has connected to it, so an open stream is kept meanwhile.
    """

    def __init__(self, router_id: str, us: Membership, reservations: Reservations) -> None:
        self._router_id = RouterId(router_id)
        self._us = us
        self._reservations = reservations
        self._listed: dict[RouterId, str] = {}
        """Addresses of the other routers in the supervisor's last view."""
        self._followed: dict[RouterId, asyncio.Task[None]] = {}
        self._flowing: set[RouterId] = set()
        """Routers whose streams have brought a batch and are open."""

    @property
    def flowing(self) -> int:
        """Number of routers whose reservations arrive."""
        return len(self._flowing)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the other routers."""
        return tuple(self._listed.values())

    def take(self, listed: Iterable[fleet_pb2.RouterEntry], tasks: asyncio.TaskGroup) -> None:
        """Follows the routers that the supervisor lists."""
        addresses = {RouterId(entry.router_id): entry.address for entry in listed if entry.address}
        addresses.pop(self._router_id, None)
        self._listed = addresses
        for router in addresses.keys() - self._followed.keys():
            follow = self._follow(router, addresses[router])
            self._followed[router] = tasks.create_task(follow, name=f"reservations of {router}")

    async def _follow(self, router: RouterId, address: str) -> None:
        """Follows a router until its stream has ended and the supervisor does not list it."""
        has_failed = False
        try:
            while router in self._listed:
                error = await self._apply_all(router, address)
                if router in self._flowing or not has_failed:
                    log.warning("router lost router=%s address=%s error=%s", router, address, error)
                has_failed = True
                self._flowing.discard(router)
                self._reservations.lost(router, time.monotonic())
                await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            del self._followed[router]

    async def _apply_all(self, router: RouterId, address: str) -> ServeError:
        """Applies the batches of a router. Returns why its stream ended."""
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
            return PeerLost(f"{address} ended its stream of reservations")
        except TimeoutError:
            return PeerLost(f"{address} said nothing of its reservations for {SILENCE_S} s")
        except grpc.aio.AioRpcError as error:
            return error_of(error, address)
        except Exception as error:
            log.exception("reservation feed failed router=%s", router)
            return InternalError(f"{type(error).__name__}: {error}")
        finally:
            await channel.close()


MESSAGE_BLOCKS = 1 << 16
"""Block hashes after which the next message begins: a mebibyte, far below the limit of a message."""


def messages_of(batch: ReservationChanges) -> Iterator[routing_pb2.ReservationBatch]:
    """Yields a batch as one message, or as several if one would be too large."""
    message = routing_pb2.ReservationBatch(opened=batch.opened, ended=batch.ended)
    blocks = 0
    for reservation in batch.placed:
        if blocks > MESSAGE_BLOCKS:
            yield message
            message, blocks = routing_pb2.ReservationBatch(), 0
        message.placed.append(_message_of(reservation))
        blocks += len(reservation.block_hashes)
    yield message


def batch_from(message: routing_pb2.ReservationBatch) -> ReservationChanges:
    return ReservationChanges(
        placed=tuple(_reservation_from(each) for each in message.placed),
        opened=tuple(RequestId(each) for each in message.opened),
        ended=tuple(RequestId(each) for each in message.ended),
    )


def _message_of(reservation: Reservation) -> routing_pb2.Reservation:
    return routing_pb2.Reservation(
        request_id=reservation.request_id,
        shares=[
            routing_pb2.WorkerShare(worker_id=worker, **dataclasses.asdict(share))
            for worker, share in reservation.shares.items()
        ],
        block_hashes=b"".join(reservation.block_hashes),
        opened=reservation.is_opened,
    )


def _reservation_from(message: routing_pb2.Reservation) -> Reservation:
    hashes = message.block_hashes
    return Reservation(
        request_id=RequestId(message.request_id),
        shares={
            WorkerId(share.worker_id): ReservedShare(share.tokens, share.seconds, share.pages, share.streams)
            for share in message.shares
        },
        block_hashes=[BlockHash(hashes[start : start + HASH_BYTES]) for start in range(0, len(hashes), HASH_BYTES)],
        is_opened=message.opened,
    )


COALESCE_S = 0.002
"""Seconds between two messages to one router: under load, one message carries many placements."""
HEARTBEAT_S = 1.0
"""Longest silence of a stream, in seconds. Then an empty message shows the receiver that this router lives."""


class RoutingService(routing_pb2_grpc.RoutingServicer):
    def __init__(self, reservations: Reservations, abort: Callable[[str, str, str | None], Awaitable[bool]]) -> None:
        """`abort` ends a tenant's request that is open here, by id or resume token. It returns whether it was open."""
        self._reservations = reservations
        self._abort = abort
        self._wakers: set[asyncio.Event] = set()
        self._is_closed = False

    def close(self) -> None:
        """Ends every stream: nothing more will be placed here."""
        self._is_closed = True
        for has_changed in self._wakers:
            has_changed.set()

    async def AbortHere(  # noqa: N802  # the name in the .proto
        self, request: routing_pb2.AbortHereRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> routing_pb2.AbortHereResponse:
        tenant = request.tenant if request.HasField("tenant") else None
        found = await self._abort(request.request_id, request.resume_token, tenant)
        return routing_pb2.AbortHereResponse(found=found)

    async def WatchReservations(  # noqa: N802  # the name in the .proto
        self, request: routing_pb2.WatchReservationsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[routing_pb2.ReservationBatch]:
        has_changed = asyncio.Event()
        self._wakers.add(has_changed)
        watch = self._reservations.watch(has_changed.set)
        log.info("reservations watched router=%s", request.router_id)
        try:
            while not self._is_closed:
                for message in messages_of(self._reservations.take(watch)):
                    yield message
                await asyncio.sleep(COALESCE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await has_changed.wait()
                has_changed.clear()
        finally:
            self._reservations.unwatch(watch)
            self._wakers.discard(has_changed)
            log.info("reservations no longer watched router=%s", request.router_id)
