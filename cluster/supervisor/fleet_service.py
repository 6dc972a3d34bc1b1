"""twostroke.v1.Fleet: every watcher gets the whole view at once, after every change, and every two seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from twostroke.base.errors import InvalidRequest, UnsupportedFeature
from twostroke.base.fault_points import Point, reach
from twostroke.config import Role
from twostroke.rpc.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

REPEAT_S = 2.0
"""Seconds after which an unchanged view is sent again, so that a watcher knows that it is current."""
QUEUE_VIEWS = 64
"""Unsent views per watcher. Every view is whole, so a slow watcher loses the oldest."""

DrainWorker = Callable[[str, float, bool, bool], Awaitable[int]]
"""Worker, seconds from now, whether it restarts, whether a role's last worker may go -> requests cut off."""
AssignRole = Callable[[str, str], Awaitable[None]]
"""Worker and role."""
TakeReport = Callable[[fleet_pb2.ReportRequest], None]
_Queue = asyncio.Queue[fleet_pb2.FleetView]


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Keeps the latest view. Each change reaches each watcher: DEAD is seen even if STARTING follows at once.

    Watchers with an address, as routers have, are in the view for as long as they watch. Nothing else is kept of
    them: a restarted supervisor learns of them when they watch again.
    """

    def __init__(
        self, drain: DrainWorker | None = None, report: TakeReport | None = None, assign_role: AssignRole | None = None
    ) -> None:
        self._drain = drain
        self._assign_role = assign_role
        self._take_report = report
        self._workers = fleet_pb2.FleetView()
        self._watchers: dict[_Queue, fleet_pb2.RouterEntry | None] = {}
        """Views not sent yet, by watcher. The value is None unless the watcher is a router."""

    def publish(self, view: fleet_pb2.FleetView) -> None:
        """Sets the workers of the view; the routers are added here."""
        self._workers = view
        self._send()

    async def Watch(  # noqa: N802  # the name in the .proto
        self, request: fleet_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[fleet_pb2.FleetView]:
        queue: _Queue = asyncio.Queue(QUEUE_VIEWS)
        is_router = bool(request.address)
        router = fleet_pb2.RouterEntry(router_id=request.watcher, address=request.address)
        self._watchers[queue] = router if is_router else None
        reach(Point.SUPERVISOR_WATCHED)
        log.info("fleet watched watcher=%s address=%s", request.watcher, request.address or "none")
        try:
            if is_router:
                self._send()
            else:
                yield self._view()
            while True:
                yield await self._next(queue)
        finally:
            del self._watchers[queue]
            log.info("fleet no longer watched watcher=%s", request.watcher)
            if is_router:
                self._send()

    async def DrainWorker(  # noqa: N802
        self, request: fleet_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.DrainWorkerResponse:
        if self._drain is None:
            raise UnsupportedFeature("nobody here can drain a worker")
        if not 0 <= request.deadline_s < math.inf:
            raise InvalidRequest(f"deadline_s must be seconds, 0 or more, got {request.deadline_s}", field="deadline_s")
        left = await self._drain(request.worker_id, request.deadline_s, request.restart, request.force)
        return fleet_pb2.DrainWorkerResponse(open_requests=left)

    async def AssignRole(  # noqa: N802
        self, request: fleet_pb2.AssignRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.AssignRoleResponse:
        if self._assign_role is None:
            raise UnsupportedFeature("nobody here can switch a worker's role")
        roles = [Role.PREFILL.value, Role.DECODE.value]
        if request.role not in roles:
            raise InvalidRequest(f"role must be {' or '.join(roles)}, got {request.role[:40]!r}", field="role")
        await self._assign_role(request.worker_id, request.role)
        return fleet_pb2.AssignRoleResponse()

    async def Report(  # noqa: N802
        self, request: fleet_pb2.ReportRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.ReportResponse:
        if self._take_report is not None:
            self._take_report(request)
        return fleet_pb2.ReportResponse()

    async def _next(self, queue: _Queue) -> fleet_pb2.FleetView:
        """Returns the oldest unsent view, or the current one after REPEAT_S without any."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(queue.get(), REPEAT_S)
        # A change may come as the wait ends, and then its view is sent: no watcher gets a view older than its last.
        return self._view() if queue.empty() else queue.get_nowait()

    def _view(self) -> fleet_pb2.FleetView:
        view = fleet_pb2.FleetView()
        view.CopyFrom(self._workers)
        routers = {router.router_id: router for router in self._watchers.values() if router is not None}
        view.routers.extend(routers.values())
        return view

    def _send(self) -> None:
        view = self._view()
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(view)
