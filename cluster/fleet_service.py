"""twostroke.v1.Fleet: every watcher gets the whole view at once, after every change, and every two seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from twostroke.rpc.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

REPEAT_S = 2.0
"""A silent view is repeated this often, so that a watcher knows that it still has the truth."""
QUEUE_VIEWS = 64
"""Unsent views per watcher; every view is whole, so a slow watcher loses the oldest."""


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Keeps the latest view. Each change reaches each watcher: DEAD is seen even if STARTING follows at once."""

    def __init__(self) -> None:
        self._view = fleet_pb2.FleetView()
        self._queues: set[asyncio.Queue[fleet_pb2.FleetView]] = set()

    def publish(self, view: fleet_pb2.FleetView) -> None:
        self._view = view
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(view)

    async def Watch(  # noqa: N802  # the name in the .proto
        self, request: fleet_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[fleet_pb2.FleetView]:
        queue: asyncio.Queue[fleet_pb2.FleetView] = asyncio.Queue(QUEUE_VIEWS)
        self._queues.add(queue)
        log.info("fleet watched watcher=%s", request.watcher)
        try:
            yield self._view
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), REPEAT_S)
                except TimeoutError:
                    yield self._view
        finally:
            self._queues.discard(queue)
            log.info("fleet no longer watched watcher=%s", request.watcher)
