"""The servers of a router: HTTP and gRPC endpoints with one request handler, the admin port, and their shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from router.addresses import Addresses, bind_listener, inherited
from router.admin import AdminServer
from router.auth.auth import Authenticator, NoAuthentication
from router.auth.key_authenticator import KeyAuthenticator
from router.auth.key_uses import KeyUses
from router.auth.limits import KeyLimits
from router.control_service import RouterControlService
from router.endpoints.app import build_http_app
from router.endpoints.grpc.calls import AuthenticatedCalls
from router.endpoints.grpc.service import SERVICE_NAME, InferenceService
from router.endpoints.middleware import browser_middleware
from router.grpc_listener.running import ListenerProcess
from router.http_server.server import HttpServer, http_config
from router.metrics import RouterMetrics
from router.preparation.preparer import read_public_prefixes
from router.requests.request_handler import RequestHandler
from router.requests.resume import Seeds
from router.requests.work import Preparer
from router.routing.reservations import Reservations
from router.server_branch import RouterParts, RouterTable, SupervisorCalls
from router.serving.dispatcher import RouterCore
from router.shared_memory import RouterMemory
from twostroke.base.allocator import give_freed_memory_back
from twostroke.base.ids import Epoch
from twostroke.config import EndpointsConfig, RouterConfig
from twostroke.models.catalog.places import recommended_sampling
from twostroke.rpc.entrance import StrangersEntrance
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import Callers, RpcServer, host_port
from twostroke.security.tls import Certificates, CertificateUse
from twostroke.tracing.recorder import Recorder

log = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.25
"""Seconds between two updates of the gRPC health service: the dispatcher's readiness has no event of its own."""
MOST_STREAMS = 4096
"""Concurrent streams of one gRPC connection. Further calls wait at the client."""
MOST_PENDING = 8192
"""Calls that may wait for their handlers. If there are more, gRPC cancels some at random, those of honest clients as
well. Each takes 17 KB."""
IDLE_MS = 75_000
"""Milliseconds after which an idle gRPC connection is closed, as over HTTP. Its client connects again when needed."""
STREAM_GRACE_MS = 3_600_000
"""Milliseconds for open streams of a connection that has reached its maximum age: longer than outputs take."""
CLOSE_GRACE_S = 1.0
"""Seconds for streams that are still open when the endpoints close."""


class RouterServer:
    """The servers of a router. Constructing one binds all ports: if one is in use, it fails before anything runs."""

    listener: ClassVar[type[ListenerProcess]] = ListenerProcess
    """Class of the process that has the clients' gRPC port."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: RouterCore,
        preparer: Preparer,
        metrics: RouterMetrics,
        *,
        router_id: str,
        recorder: Recorder | None = None,
        reservations: Reservations | None = None,
        branches: RouterTable = (),
    ) -> None:
        """`reservations` are what other routers of the cluster may watch."""
        self._dispatcher = dispatcher
        shared = RouterMemory.of(config.shared_fd)
        self._authenticator = _authenticator(config, metrics, shared)
        self._preparer = preparer
        handler = _handler(config, dispatcher, preparer, metrics, recorder)
        certificates = None if config.tls is None else Certificates(config.tls, CertificateUse.CLIENTS)
        metrics.expiries.watch("clients", certificates)
        listen = config.listen
        self._listener = _listener(config)
        calls = AuthenticatedCalls(self._authenticator)
        with contextlib.ExitStack() as opened:
            opened.callback(self._listener.close)
            grpc_listener = self._grpc_listener(config, metrics)
            opened.callback(grpc_listener.leave)
            self._admin = AdminServer(config, handler, Reservations() if reservations is None else reservations)
            open_methods = [name for branch in branches for name in branch.open_methods]
            self._rpc = _clients_rpc(config, calls, grpc_listener, open_methods)
            opened.pop_all()
        http = host_port(listen.host, self._listener.getsockname()[1])
        self.addresses = Addresses(http, self._rpc.address, self._admin.address, self._admin.metrics_address or http)
        membership = Membership.of(config.cluster_token, config.cluster_tls)
        supervisor = SupervisorCalls(config.fleet_address, membership)
        parts = RouterParts(config, handler, calls, supervisor, recorder or Recorder(), router_id)
        self._branches = [branch(parts) for branch in branches]
        app = build_http_app(
            handler,
            self._authenticator,
            max_body_bytes=config.endpoints.max_request_bytes,
            with_metrics=self._admin.metrics_address is None,
            outer=browser_middleware(config.endpoints, listen.host),
            pages=[page for branch in self._branches for page in branch.pages],
            operators=[call for branch in self._branches for call in branch.operators],
            further=[route for branch in self._branches for route in branch.routes],
        )
        most = config.endpoints.max_connections
        http_settings = http_config(app, grace_s=int(CLOSE_GRACE_S), most_connections=most, certificates=certificates)
        self._shares_ports = shared.is_shared
        self._http = HttpServer(http_settings, shared if shared.is_shared else None, lambda: dispatcher.is_ready)
        self._leaving: asyncio.Task[None] | None = None
        """Stops the gRPC server, so that its clients connect to other processes with the same port."""
        InferenceService(handler, calls).add_to(self._rpc.server)
        self._rpc.offer(SERVICE_NAME, *(name for branch in branches for name in branch.services), is_described=True)
        for branch in self._branches:
            branch.serve(self._rpc)
        control = RouterControlService(handler, self.addresses, router_id=router_id, epoch=Epoch.begin(1))
        self._admin.serve(control, self._branches)

    @property
    def peer_address(self) -> str:
        """Address at which other routers reach this one."""
        return self._admin.peer_address

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Opens all endpoints. At the end they close, and open requests are cancelled."""
        for branch in self._branches:
            await branch.open()
        await self._rpc.start()
        async with asyncio.TaskGroup() as group:
            await self._admin.start(group)
            http = group.create_task(self._http.serve([self._listener]))
            watches = [
                group.create_task(self._show_health()),
                group.create_task(give_freed_memory_back()),
                group.create_task(self._authenticator.watch()),
                group.create_task(self._preparer.run()),
            ]
            await self._http.is_up.wait()
            named = self.addresses
            log.info("router is up http=%s grpc=%s admin=%s", named.http, named.grpc, named.admin)
            try:
                yield
            finally:
                for watch in watches:
                    watch.cancel()
                if self._leaving is not None:
                    self._leaving.cancel()
                self._http.should_exit = True
                await asyncio.gather(self._stop_rpc(CLOSE_GRACE_S), self._admin.stop(CLOSE_GRACE_S))
                await asyncio.wait([http])

    async def hand_over(self, grace_s: float) -> None:
        """Leaves the ports to a new process of this router.

        It accepts no new connections, and gives open connections and requests `grace_s` to end.
        """
        log.info("handing over grace_s=%.0f", grace_s)
        until_s = time.time() + grace_s
        stopping = [
            asyncio.create_task(self._stop_rpc(grace_s), name="rpc server stops"),
            asyncio.create_task(self._admin.hand_over(grace_s), name="admin server stops"),
        ]
        self._leaving = stopping[0]
        try:
            await asyncio.gather(self._http.leave(grace_s), asyncio.wait(stopping[:1], timeout=grace_s))
            left = await self._dispatcher.drain(until_s)
            log.info("handed over open=%d", left)
        finally:
            for task in stopping:
                task.cancel()

    async def drain(self, grace_s: float) -> int:
        """Takes no new requests, and gives open ones and clients that still read `grace_s`. Returns how many requests
        were left.
        """
        until_s = time.time() + grace_s
        left = await self._dispatcher.drain(until_s)
        if not left:
            rest_s = max(CLOSE_GRACE_S, until_s - time.time())
            await asyncio.gather(self._stop_rpc(rest_s), self._http.until_all_is_sent(rest_s))
        return left

    def _grpc_listener(self, config: RouterConfig, metrics: RouterMetrics) -> ListenerProcess:
        listen, is_inherited = config.listen, config.grpc_fd is not None
        if config.grpc_fd is not None:
            listening = inherited(config.grpc_fd, "grpc_fd")
        else:
            shares_port = config.http_fd is not None
            listening = bind_listener(listen.host, listen.grpc_port, "--grpc-port", shares_port=shares_port)
        most, count_cut = config.endpoints.max_connections, metrics.count_cut_connection
        return self.listener(listening, most, config.tls, count_cut, is_shared=is_inherited)

    async def _show_health(self) -> None:
        while True:
            is_ready = self._dispatcher.is_ready and not self._dispatcher.is_draining
            await self._rpc.set_serving(is_ready)
            await self._admin.set_serving(is_ready)
            if self._dispatcher.is_draining and self._shares_ports and self._leaving is None:
                self._leave_to_others()
            await asyncio.sleep(HEALTH_PERIOD_S)

    def _leave_to_others(self) -> None:
        """Has clients connect to the routers with the same ports, after their open requests."""
        self._http.say_that_each_response_is_the_last()
        grace_s = STREAM_GRACE_MS / 1000
        self._leaving = asyncio.create_task(self._stop_rpc(grace_s), name="rpc server leaves its port to others")

    async def _stop_rpc(self, grace_s: float) -> None:
        for branch in self._branches:
            branch.leave()
        await self._rpc.stop(grace_s)


def _listener(config: RouterConfig) -> socket.socket:
    if config.http_fd is None:
        return bind_listener(config.listen.host, config.listen.http_port)
    return inherited(config.http_fd, "http_fd")


def _handler(
    config: RouterConfig,
    dispatcher: RouterCore,
    preparer: Preparer,
    metrics: RouterMetrics,
    recorder: Recorder | None,
) -> RequestHandler:
    return RequestHandler(
        dispatcher,
        preparer,
        metrics,
        model=config.served_model_name,
        seeds=Seeds(config.cluster_token, config.routing.seed),
        public=read_public_prefixes(config.routing.public_prefixes, preparer.text),
        recorder=recorder,
        recommended=recommended_sampling(config.model_dir),
    )


def _authenticator(config: RouterConfig, metrics: RouterMetrics, shared: RouterMemory) -> Authenticator:
    if config.endpoints.api_keys is None:
        return NoAuthentication(config.cluster_token)
    return KeyAuthenticator(config.endpoints.api_keys, config.cluster_token, metrics, KeyLimits(KeyUses(shared)))


def _clients_rpc(
    config: RouterConfig, calls: AuthenticatedCalls, listener: ListenerProcess, open_methods: Sequence[str]
) -> RpcServer:
    callers = Callers(
        options=_client_options(config.endpoints),
        entrance=StrangersEntrance(calls.admit, calls.check),
        open_methods=tuple(open_methods),
        max_message_bytes=config.endpoints.max_request_bytes,
        most_connections=config.endpoints.max_connections,
    )
    return RpcServer(config.listen.host, listener.port, token=None, callers=callers, behind=listener)


def _client_options(endpoints: EndpointsConfig) -> tuple[tuple[str, int], ...]:
    """Returns gRPC options for connections of clients, which may be hostile."""
    age_ms = int(1000 * endpoints.max_connection_age_s)
    return (
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.server.max_pending_requests", MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
        ("grpc.max_connection_age_ms", age_ms),
        ("grpc.max_connection_age_grace_ms", STREAM_GRACE_MS),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_ping_strikes", 5),
    )
