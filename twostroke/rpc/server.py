"""The server funnel: every call is authenticated here, and every exception becomes a status here and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.base.credentials import CLUSTER_NAME
from twostroke.base.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    Overloaded,
    ServeError,
    Unauthenticated,
    UnsupportedFeature,
    without_frames,
)
from twostroke.observability.bug_log import log_bug
from twostroke.rpc.connections import SPARE, Connections
from twostroke.rpc.entrance import Context, Entrance, OpenCalls, OwnEntrance
from twostroke.rpc.proof import BEGIN, CallVerifier
from twostroke.rpc.public_services import HealthService, serve_reflection
from twostroke.rpc.tls import server_credentials
from twostroke.security.tls import Certificates

log = logging.getLogger(__name__)

ERROR_KIND_KEY = "twostroke-error-kind"
ERROR_CODE_KEY = "twostroke-error-code"
"""OpenAI's `code`, where the error has one over HTTP."""
ERROR_FIELD_KEY = "twostroke-error-field-bin"
RETRYABLE_KEY = "twostroke-retryable"
RETRY_AFTER_KEY = "retry-after-ms"
"""Only where it was predicted. No name of ours: clients of other servers know it from HTTP."""
MAX_MESSAGE_BYTES = 32 << 20
"""Between processes of a cluster: a million token ids with names and room to spare; pages never come this way."""
HANDSHAKE_MS = 20_000
"""The limit of a handshake. gRPC's default is two minutes, in which a silent peer has a descriptor."""
MOST_CONNECTIONS = 4096
"""From peers. Where there are more, those that have shown no token make room (see `connections`)."""

_OF_PEERS = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
)
"""Between processes of a cluster: a frozen puller's lease ends in about three seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callers:
    """The callers of a server, and what it lets them do."""

    options: tuple[tuple[str, int], ...] = _OF_PEERS
    """The options of gRPC."""
    entrance: Entrance = field(default_factory=OwnEntrance)
    open_methods: tuple[str, ...] = ()
    """Paths of methods that everybody may call, besides health and reflection: "/package.Service/Method"."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    most_connections: int = MOST_CONNECTIONS
    strangers_bytes: int = 2 * MAX_MESSAGE_BYTES
    """Bytes that a connection may have sent before a call over it is let in. More is an attack. gRPC reads the message
    of a call of the cluster's own before it says where that comes from."""


PEERS = Callers()

_OWN_HOST = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
"""What gRPC calls peers begin with that are on this host."""

_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")


class Funnel(grpc.aio.ServerInterceptor):
    """Wraps every handler: checks that callers have the token (where one is set), maps ServeError to its status.

    Their proof is looked for in the headers, before gRPC reads the message: a call without one leaves no memory behind.
    """

    def __init__(
        self,
        token: str | None,
        callers: Callers,
        connections: Connections,
        *,
        refuses_plain: bool = False,
        saw_call: Callable[[], None] | None = None,
    ) -> None:
        """`refuses_plain`: the token is worth nothing on connections without TLS, unless they come from this host.
        `saw_call` is told of every call.
        """
        self.verifier = CallVerifier(token) if token else None
        self._entrance = callers.entrance
        self._open_methods = (*callers.open_methods, BEGIN)
        self._connections = connections
        self.open_calls = OpenCalls(connections)
        self._refuses_plain = refuses_plain
        self._saw_call = saw_call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if self._saw_call is not None:
            self._saw_call()
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        is_open = method.startswith(_OPEN_SERVICES) or method in self._open_methods
        if handler.request_streaming and is_open:
            return self.open_calls.follow(handler)
        if not is_open and self.verifier is not None:
            try:
                self.verifier.check(handler_call_details.invocation_metadata, method)
            except Unauthenticated as error:
                return _refusal(method, error)
        if handler.request_streaming:
            reading = self._reading(handler, method)
            return grpc.stream_stream_rpc_method_handler(reading, response_serializer=handler.response_serializer)
        entrance: Entrance = self.open_calls if is_open else self._entrance
        make, wrap = (
            (entrance.streaming, self._streaming) if handler.response_streaming else (entrance.unary, self._unary)
        )
        return make(wrap(handler, method, is_open), response_serializer=handler.response_serializer)

    def _unary(self, handler: Any, method: str, is_open: bool) -> Any:
        entrance: Entrance = self.open_calls if is_open else self._entrance

        async def funnelled(came: Any, context: Context) -> object:
            try:
                self._check_connection(context, is_open)
                async with entrance.admit(context):
                    with self._counted(context, is_open):
                        return await handler.unary_unary(await self._message(handler, entrance, came, context), context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _abort(context, method, error)

        return funnelled

    def _streaming(self, handler: Any, method: str, is_open: bool) -> Any:
        entrance: Entrance = self.open_calls if is_open else self._entrance

        async def funnelled(came: Any, context: Context) -> AsyncIterator[object]:
            try:
                self._check_connection(context, is_open)
                async with entrance.admit(context):
                    with self._counted(context, is_open):
                        responses = handler.unary_stream(await self._message(handler, entrance, came, context), context)
                        if inspect.isawaitable(responses):  # a handler that writes its responses itself
                            await responses
                            return
                        async with contextlib.aclosing(responses):  # a call that ends here ends what serves it
                            async for response in responses:
                                yield response
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _abort(context, method, error)

        return funnelled

    def _reading(self, handler: Any, method: str) -> Any:
        """Returns a handler that reads its requests from the context and writes its responses itself."""

        async def funnelled(came: Any, context: Context) -> None:
            del came
            try:
                self._check_connection(context, is_open=False)
                self._entrance.check(context)
                with self._counted(context, is_open=False):
                    await handler.stream_stream(context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _abort(context, method, error)

        return funnelled

    async def _message(self, handler: Any, entrance: Entrance, came: Any, context: Context) -> Any:
        """Returns the request; bytes that are none (text that is not UTF-8, for one) are the caller's mistake.

        No variable of a caller may name it: gRPC keeps the error that `abort` raises, and with it the frames that it
        came through, until the garbage collector finds them.
        """
        raw = await entrance.message(came, context)
        if handler.request_deserializer is None:
            return raw
        try:
            return handler.request_deserializer(raw)
        except DecodeError as error:
            raise InvalidRequest(f"the request is not a valid message: {error}") from error

    def _check_connection(self, context: Context, is_open: bool) -> None:
        if self.verifier is None or is_open:
            return
        shown = context.auth_context()
        if b"ssl" in shown.get("transport_security_type", ()):
            # The CA may have issued for others as well; gRPC looks at the names of servers only.
            if CLUSTER_NAME.encode() not in shown.get("x509_subject_alternative_name", ()):
                raise Unauthenticated(f"the certificate does not name {CLUSTER_NAME} in its subjectAltName")
        elif self._refuses_plain and not context.peer().startswith(_OWN_HOST):
            raise Unauthenticated(
                "from another host this takes TLS with a certificate of the cluster, on the peer port"
            )

    def _counted(self, context: Context, is_open: bool) -> AbstractContextManager[object]:
        """Notes that the connection belongs to an admitted client."""
        return contextlib.nullcontext() if is_open else self._connections.calling(context.peer())


def _refusal(method: str, error: ServeError) -> grpc.RpcMethodHandler[Any, Any]:
    """Answers a call of any kind without reading its message."""

    async def refused(came: Any, context: Context) -> None:
        del came
        await _abort(context, method, error)

    return grpc.stream_stream_rpc_method_handler(refused)


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    if isinstance(error, NotImplementedError):  # as generated servicers answer
        error = UnsupportedFeature(f"{method} is not offered by this process")
    if not isinstance(error, ServeError):
        log_bug(log, "internal error method=%s", method, error=error)
        error = InternalError(f"internal error: {type(error).__name__}: {error}")
    without_frames(error)
    trailing: tuple[tuple[str, str | bytes], ...] = (
        (ERROR_KIND_KEY, type(error).__name__),
        (ERROR_FIELD_KEY, (error.field or "").encode()),
        (RETRYABLE_KEY, "true" if error.retryable else "false"),
    )
    if error.code is not None:
        trailing += ((ERROR_CODE_KEY, error.code),)
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        trailing += ((RETRY_AFTER_KEY, str(math.ceil(error.retry_after_s * 1000))),)
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, trailing_metadata=trailing)


class TlsPort(NamedTuple):
    port: int
    certificates: Certificates


class Intermediary(Protocol):
    """Has the port in the server's place, and passes on what comes to a Unix socket."""

    backend: str
    """The path of that socket."""

    def start(self) -> None: ...

    def saw_call(self) -> None:
        """Hears of each call, as soon as the server looks at it."""

    def leave(self) -> None:
        """Takes no more clients."""

    async def end(self) -> None: ...


class RpcServer:
    """A grpc.aio server with the funnel, health service and message limits; bound when constructed, started later."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        certificates: Certificates | None = None,
        tls_port: TlsPort | None = None,
        callers: Callers = PEERS,
        shares_port: bool = False,
        behind: Intermediary | None = None,
    ) -> None:
        """`certificates`: TLS, mutual where they ask clients. `tls_port`: in addition to a plain port for probes.
        `shares_port`: with others that do, of the same user; the kernel spreads new connections over them.
        `behind`: what has the port.
        """
        ports = [(port, certificates), *([] if tls_port is None else [tls_port])]
        self._behind = behind
        if behind is None:
            for each, _ in ports:
                check_can_listen(host, each, shares_port)
        self._connections = Connections(callers.most_connections, callers.strangers_bytes)
        self._keeping: asyncio.Task[None] | None = None
        self._offered = {"": True, "ready": True, "live": False}
        """Names that health knows, and whether they wait until the process is ready."""
        self._described: list[str] = []
        """Services that reflection tells of. One servicer does: gRPC asks the first that is added, and no other."""
        funnel = Funnel(
            *(token, callers, self._connections),
            refuses_plain=tls_port is not None,
            saw_call=None if behind is None else behind.saw_call,
        )
        self._open_calls = funnel.open_calls
        self.server = grpc.aio.server(
            interceptors=[funnel],
            options=[
                ("grpc.max_receive_message_length", callers.max_message_bytes),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", int(shares_port)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_allowed_incoming_connections", callers.most_connections + SPARE),
                *callers.options,
            ],
        )
        if behind is None:
            self.addresses = [self._bind(host, *each) for each in ports]
        else:
            self.server.add_insecure_port(f"unix:{behind.backend}")
            self.addresses = [host_port(host, port)]
        self.address = self.addresses[0]
        self.dialled_at = list(self.addresses)
        """Addresses that callers may dial."""
        self.health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        if funnel.verifier is not None:
            self._prove_to_callers(funnel.verifier)

    def offer(self, *services: str, waits_for_ready: bool = True, is_described: bool = False) -> None:
        """Says the health of these services by their names: as that of "ready", or always good. `is_described`: clients
        learn by reflection what they are. Before serving.
        """
        self._offered |= dict.fromkeys(services, waits_for_ready)
        if is_described:
            self._described += services

    async def set_serving(self, ready: bool) -> None:
        """Sets the health of "", "ready" and the services that wait for it. "live" is SERVING as long as the process
        answers.
        """
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for service, waits_for_ready in self._offered.items():
            await self.health.set(service, serving if ready or not waits_for_ready else not_serving)

    async def start(self) -> None:
        await self.set_serving(False)
        if self._described:
            serve_reflection(self._described, self.server)
        await self.server.start()
        if self._behind is not None:
            self._behind.start()
            return
        self._keeping = asyncio.create_task(self._connections.keep(self.addresses), name="connections")

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls. Returns when open ones have ended, after `grace_s` at the latest; those of everybody end
        at once.

        Where it is cancelled, open calls go on: whoever cancels it stops the server again, with another grace.
        """
        self._open_calls.leave()
        if self._behind is not None:
            self._behind.leave()
        await self.server.stop(grace_s)
        if self._behind is not None:
            await self._behind.end()
        if self._keeping is not None:
            self._keeping.cancel()

    def _prove_to_callers(self, verifier: CallVerifier) -> None:
        async def begin(request: bytes, context: Context) -> bytes:
            del context
            return verifier.begin(request, self.dialled_at)

        service, _, name = BEGIN[1:].rpartition("/")
        handler = grpc.method_handlers_generic_handler(service, {name: grpc.unary_unary_rpc_method_handler(begin)})
        self.server.add_generic_rpc_handlers((handler,))

    def _bind(self, host: str, port: int, certificates: Certificates | None) -> str:
        try:
            bound = self.server.add_secure_port(host_port(host, port), server_credentials(certificates))
        except RuntimeError as error:
            raise _cannot_listen(host, port) from error
        return host_port(host, bound)


def host_port(host: str, port: int) -> str:
    """Returns the address as it is written: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_can_listen(host: str, port: int, shares_port: bool) -> None:
    """Checks that a server can listen before one is made: one that was never started hangs when it is collected."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares_port))
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port) from error


def _cannot_listen(host: str, port: int) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host_port(host, port)}: the port is in use or the address is not this machine's",
        field="port",
    )
