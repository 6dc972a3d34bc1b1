"""A router process: both doors on their ports around one front, and the way down again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import uvicorn
from grpc_reflection.v1alpha import reflection

from router.front import Front
from router.generation import Dispatcher
from router.grpc_service import SERVICE_NAMES, ControlService, InferenceService
from router.http_app import build_http_app
from router.http_server import HttpServer
from router.listener import bind_listener, inherited
from router.metrics import RouterMetrics
from router.public_prefixes import read_public_prefixes
from router.reservations import Reservations
from router.resume import Seeds
from router.routing_service import RoutingService
from router.text import Text
from twostroke.config import RouterConfig
from twostroke.errors import ConfigError
from twostroke.faults import install
from twostroke.ids import Epoch
from twostroke.rpc.faults import serve_faults
from twostroke.rpc.server import RpcServer, host_port
from twostroke.rpc.v1 import control_pb2_grpc, inference_pb2_grpc, routing_pb2_grpc

log = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.25
"""How stale the gRPC health service may be; the dispatcher's readiness has no event of its own."""
KEEP_ALIVE_S = 75
"""Longer than load balancers keep idle connections: the side that opened a connection should be the one to close it."""
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Of a router that listens on every interface: the routers of one `twostroke serve` are on one machine."""
CLOSE_GRACE_S = 1.0
"""For streams that are still open when the doors close."""


class RouterServer:
    """Both doors. Ports are bound when it is constructed, so that a port in use fails before anything runs."""

    def __init__(
        self, config: RouterConfig, dispatcher: Dispatcher, text: Text, metrics: RouterMetrics, *, router_id: str
    ) -> None:
        self._dispatcher = dispatcher
        public = read_public_prefixes(config.public_prefixes, text)
        self._listener = (
            bind_listener(config.host, config.http_port) if config.http_fd is None else inherited(config.http_fd)
        )
        self.http_address = host_port(config.host, self._listener.getsockname()[1])
        try:
            self._rpc = RpcServer(
                config.host,
                config.grpc_port,
                token=None,
                max_message_bytes=config.max_message_bytes,
                shares_port=config.http_fd is not None,
            )
        except ConfigError:
            self._listener.close()
            raise
        self.grpc_address = self._rpc.address
        # By its port: that is the same in the router's next life.
        injector = install(f"router-{self.grpc_address.rpartition(':')[2]}")
        serve_faults(injector, self._rpc.server, config.cluster_token)
        front = Front(
            dispatcher,
            text,
            metrics,
            model=config.served_model_name,
            seeds=Seeds(config.cluster_token, config.seed),
            public=public,
        )
        self._http = HttpServer(
            uvicorn.Config(
                build_http_app(front, max_body_bytes=config.max_message_bytes),
                http="h11",
                lifespan="off",
                log_config=None,
                access_log=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(CLOSE_GRACE_S),
            )
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(front), self._rpc.server)
        control = ControlService(
            front,
            router_id=router_id,
            epoch=Epoch.begin(1),
            cluster_token=config.cluster_token,
            metrics_address=self.http_address,
        )
        control_pb2_grpc.add_ControlServicer_to_server(control, self._rpc.server)
        self._routing: RoutingService | None = None
        reflection.enable_server_reflection(
            (*SERVICE_NAMES, reflection.SERVICE_NAME, "grpc.health.v1.Health"), self._rpc.server
        )

    @property
    def peer_address(self) -> str:
        """Of the rpc server, as other routers reach it."""
        host, _, port = self.grpc_address.rpartition(":")
        return f"{_LOOPBACKS.get(host, host)}:{port}"

    def share(self, reservations: Reservations, cluster_token: str) -> None:
        """Let other routers of the cluster watch them. Before serving."""
        self._routing = RoutingService(reservations, cluster_token)
        routing_pb2_grpc.add_RoutingServicer_to_server(self._routing, self._rpc.server)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Both doors are open inside; at the end they close, and what is still open is cancelled."""
        await self._rpc.start()
        async with asyncio.TaskGroup() as group:
            http = group.create_task(self._http.serve([self._listener]))
            health = group.create_task(self._show_health())
            await self._http.is_up.wait()
            log.info("router is up http=%s grpc=%s", self.http_address, self.grpc_address)
            try:
                yield
            finally:
                health.cancel()
                if self._routing is not None:
                    self._routing.close()
                self._http.should_exit = True
                await self._rpc.stop(CLOSE_GRACE_S)
                await asyncio.wait([http])

    async def hand_over(self, grace_s: float) -> None:
        """Another life of this router serves on the same ports: take no new connections, answer over those that are
        there until each is closed, and give what is open `grace_s`."""
        log.info("handing over grace_s=%.0f", grace_s)
        until_s = time.time() + grace_s
        if self._routing is not None:
            self._routing.close()
        stopping = asyncio.create_task(self._rpc.stop(grace_s), name="rpc server stops")
        try:
            await self._http.leave(grace_s)
            left = await self._dispatcher.drain(until_s)
            log.info("handed over open=%d", left)
        finally:
            stopping.cancel()

    async def drain(self, grace_s: float) -> int:
        """Take nothing new and give open requests `grace_s`; how many were left."""
        return await self._dispatcher.drain(time.time() + grace_s)

    async def _show_health(self) -> None:
        while True:
            await self._rpc.set_serving(self._dispatcher.is_ready and not self._dispatcher.is_draining)
            await asyncio.sleep(HEALTH_PERIOD_S)
