"""twostroke.v1.Routing: other routers of the cluster watch what this one has placed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from router.reservation_messages import messages_of
from router.reservations import Reservations
from twostroke.rpc.v1 import routing_pb2, routing_pb2_grpc

log = logging.getLogger(__name__)

COALESCE_S = 0.002
"""Between two messages to one router: under load one message carries many placements, and costs little per request."""
HEARTBEAT_S = 1.0
"""Longest silence: whoever hears nothing for longer knows that the stream is dead."""


class RoutingService(routing_pb2_grpc.RoutingServicer):
    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        self._wakers: set[asyncio.Event] = set()
        self._is_closed = False

    def close(self) -> None:
        """End every stream: nothing more will be placed here."""
        self._is_closed = True
        for has_news in self._wakers:
            has_news.set()

    async def WatchReservations(  # noqa: N802  # the name in the .proto
        self, request: routing_pb2.WatchReservationsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[routing_pb2.ReservationBatch]:
        del context
        has_news = asyncio.Event()
        self._wakers.add(has_news)
        watch = self._reservations.watch(has_news.set)
        log.info("reservations watched router=%s", request.router_id)
        try:
            while not self._is_closed:
                for message in messages_of(self._reservations.take(watch)):
                    yield message
                await asyncio.sleep(COALESCE_S)
                await _wait(has_news)
                has_news.clear()
        finally:
            self._reservations.unwatch(watch)
            self._wakers.discard(has_news)
            log.info("reservations no longer watched router=%s", request.router_id)


async def _wait(has_news: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            await has_news.wait()
    except TimeoutError:
        return
