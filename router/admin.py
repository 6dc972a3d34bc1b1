"""The admin port for operators and other routers, and the metrics port if there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from router.addresses import bind_listener
from router.control_service import RouterControlService
from router.endpoints.health_pages import HealthPages
from router.http_server.server import HttpServer, http_config
from router.requests.request_handler import RequestHandler
from router.routing.reservation_exchange import RoutingService
from router.routing.reservations import Reservations
from router.server_branch import RouterBranch
from twostroke.config import RouterConfig
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import Callers, RpcServer, TlsPort, host_port
from twostroke.rpc.v1 import control_pb2_grpc, routing_pb2_grpc

_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses for other routers of a router that listens everywhere: all of one `twostroke serve` share a machine."""

MOST_SCRAPERS = 256
MOST_MESSAGE_BYTES = 1 << 20
"""Most bytes of a request to the admin port. It holds before authentication, too, and all requests there are short."""


class AdminServer:
    """The router's server for its operators. Constructing one binds its ports."""

    def __init__(self, config: RouterConfig, handler: RequestHandler, reservations: Reservations) -> None:
        endpoints, shares_port = config.endpoints, config.http_fd is not None
        self._routing = RoutingService(reservations, handler.abort_here)
        self._pages: HttpServer | None = None
        self._serving_pages: asyncio.Task[None] | None = None
        self.metrics_address: str | None = None
        """Address of the metrics port. None: the clients' HTTP port has the metrics."""
        metrics_port = endpoints.own_metrics_port
        if metrics_port is not None:
            host = endpoints.metrics_host or config.listen.host
            self._listener = bind_listener(host, metrics_port, "--metrics-port", shares_port=shares_port)
            self._pages = HttpServer(http_config(HealthPages(handler).app(), grace_s=0, most_connections=MOST_SCRAPERS))
            self.metrics_address = host_port(host, self._listener.getsockname()[1])
        self._peer_host = config.peer_host
        membership = Membership.of(config.cluster_token, config.cluster_tls)
        tls_port = None if membership.certificates is None else TlsPort(config.peer_port, membership.certificates)
        self._rpc = RpcServer(
            config.listen.host,
            endpoints.admin_port,
            token=membership.token,
            tls_port=tls_port,
            callers=Callers(max_message_bytes=MOST_MESSAGE_BYTES),
            shares_port=shares_port,
        )
        self.address = self._rpc.address
        self._rpc.dialled_at.append(self.peer_address)

    def serve(self, control: RouterControlService, branches: Iterable[RouterBranch]) -> None:
        """Adds the services to the admin port. Call it before `start`."""
        control_pb2_grpc.add_ControlServicer_to_server(control, self._rpc.server)
        self._rpc.offer("twostroke.v1.Control", waits_for_ready=False, is_described=True)
        for branch in branches:
            branch.administer(self._rpc)
        routing_pb2_grpc.add_RoutingServicer_to_server(self._routing, self._rpc.server)
        self._rpc.offer("twostroke.v1.Routing", waits_for_ready=False)

    @property
    def peer_address(self) -> str:
        """Address at which other routers reach this one: the TLS port if the cluster has certificates."""
        host, _, port = self._rpc.addresses[-1].rpartition(":")
        return f"{self._peer_host or _LOOPBACKS.get(host, host)}:{port}"

    async def set_serving(self, ready: bool) -> None:
        await self._rpc.set_serving(ready)

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Starts serving. The metrics port is a task of `group`, which ends with `stop`."""
        await self._rpc.start()
        if self._pages is not None:
            self._serving_pages = group.create_task(self._pages.serve([self._listener]))
            await self._pages.is_up.wait()

    async def stop(self, grace_s: float) -> None:
        self._routing.close()
        if self._pages is not None:
            self._pages.should_exit = True
        await self._rpc.stop(grace_s)
        if self._serving_pages is not None:
            await asyncio.wait([self._serving_pages])

    async def hand_over(self, grace_s: float) -> None:
        """Accepts no new connections, because a new process has the ports, and gives open calls `grace_s`."""
        self._routing.close()
        if self._pages is not None:
            await self._pages.leave(0)
        await self._rpc.stop(grace_s)
