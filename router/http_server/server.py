"""uvicorn with what a router needs: an event for being up, no signal handlers, and a stop that refuses no client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp

from router.http_server.fair_acceptor import FairAcceptor
from router.http_server.protocol import HEADERS_S, TimedProtocol, timed_protocol
from router.shared_memory import RouterMemory
from twostroke.security.tls import Certificates

KEEP_ALIVE_S = 75
"""Seconds for which an idle connection is kept, longer than load balancers keep theirs: the side that opened a
connection should be the one to close it."""
LEAVE_IDLE_S = 20.0
"""Seconds for idle connections when a router stops. Clients drop them earlier (httpx after 5 s, aiohttp after 15 s), so
none is closed while a request is on its way over it."""
HANDSHAKE_S = 2.0
"""Seconds for handshakes when a router stops: a client that sends nothing must not hold it up for longer."""
LOOK_S = 0.05
"""Seconds between two looks at connections: uvicorn has no event for their end."""


def http_config(
    app: ASGIApp, *, grace_s: int, most_connections: int, certificates: Certificates | None = None
) -> uvicorn.Config:
    timed = timed_protocol(most_connections)
    return uvicorn.Config(
        app,
        http=timed if certificates is None else tls_handshake(timed, certificates.renewing_server()),
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
    )


class HttpServer(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, shared: RouterMemory | None = None, serves: Callable[[], bool] = lambda: True
    ) -> None:
        """`shared` is the memory of routers that accept from the same listening sockets. `serves` returns whether this
        router can serve requests."""
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._shared, self._serves = shared, serves
        self._acceptors: list[FairAcceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets if self._shared is None else [])
        if self._shared is not None:
            for listener in sockets or ():
                acceptor = FairAcceptor(listener, self._protocol, self._count_connections, self._shared, self._serves)
                acceptor.start()
                self._acceptors.append(acceptor)
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.stop()
        protocol = self.config.http_protocol_class
        if issubclass(protocol, TlsHandshake):
            for transport in list(protocol.waiting.values()):
                transport.abort()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def leave(self, grace_s: float) -> None:
        """Accepts nothing more, and ends every connection with its next response. Returns when all have ended, or after
        `grace_s`.

        Connections that are not accepted yet are left to the process that shares the listening socket. A response that
        has begun does not end its connection: its head did not say so, and its client may be sending again.
        """
        await self._stop_accepting()
        self.say_that_each_response_is_the_last()
        idle_since_s: dict[TimedProtocol, float] = {}
        begun_s = time.monotonic()
        while (passed_s := time.monotonic() - begun_s) < grace_s:
            if not self.server_state.connections and not (passed_s < HANDSHAKE_S and self.is_arriving):
                return
            self._close_idle(idle_since_s, time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def until_all_is_sent(self, most_s: float) -> None:
        """Returns when clients have taken all of their answers, or after `most_s`."""
        end_s = time.monotonic() + most_s
        while any(each.is_served for each in self._connections()):
            if time.monotonic() >= end_s:
                return
            await asyncio.sleep(LOOK_S)

    async def _stop_accepting(self) -> None:
        """Stops accepting, and waits for accepted sockets to become connections: asyncio would drop them when its
        server is closed."""
        for server in self.servers:
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener)
        for acceptor in self._acceptors:
            acceptor.stop()
        await asyncio.sleep(LOOK_S)
        for server in self.servers:
            server.close()

    def say_that_each_response_is_the_last(self) -> None:
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)  # uvicorn makes the default headers of these again each second
        self.server_state.default_headers = [*self.server_state.default_headers, close]

    def _close_idle(self, idle_since_s: dict[TimedProtocol, float], now_s: float) -> None:
        for connection in self._connections():
            if connection.is_served:
                idle_since_s.pop(connection, None)
            elif idle_since_s.setdefault(connection, now_s) + LEAVE_IDLE_S < now_s:
                connection.shutdown()

    @property
    def is_arriving(self) -> bool:
        """Whether an accepted client has not finished its handshake."""
        protocol = self.config.http_protocol_class
        return issubclass(protocol, TimedProtocol | TlsHandshake) and len(protocol.arriving) > 0

    def _protocol(self) -> asyncio.Protocol:
        made_of = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return self.config.http_protocol_class(**made_of)

    def _count_connections(self) -> int:
        return len(self.server_state.connections)

    def _connections(self) -> list[TimedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, TimedProtocol)]


class TlsHandshake(asyncio.Protocol):
    timed: ClassVar[type[TimedProtocol]]
    """Protocol of the connection after the handshake."""
    context: ClassVar[ssl.SSLContext]
    arriving: ClassVar[weakref.WeakSet[TlsHandshake]]
    """Accepted connections with an unfinished handshake."""
    waiting: ClassVar[dict[TlsHandshake, asyncio.Transport]]
    """Connections whose handshake runs, the oldest first, and their transports."""

    def __init__(self, **made_of: Any) -> None:
        self._made_of = made_of
        self._early: list[bytes] = []
        """Bytes that came right after the handshake."""
        self._inner: TimedProtocol | None = None
        self._is_lost = False
        self.arriving.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # the next bytes are for the handshake
        self.waiting[self] = transport
        self._shaking = asyncio.get_running_loop().create_task(self._shake_hands(transport), name="TLS handshake")
        if len(self.waiting) > self.timed.most_connections:
            self.waiting.pop(next(iter(self.waiting))).abort()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._inner is not None:
            self._inner.connection_lost(exc)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            if transport.is_closing():
                return
            encrypted = await asyncio.get_running_loop().start_tls(
                transport, self, self.context, server_side=True, ssl_handshake_timeout=HEADERS_S
            )
        except OSError as error:  # also errors of TLS, of which TLS has informed the client
            # The error and its frames hold each other, and with them a quarter of a megabyte for the cipher.
            traceback.clear_frames(error.__traceback__)
            return
        finally:
            self.waiting.pop(self, None)
            self.arriving.discard(self)
        if encrypted is None or self._is_lost:
            return
        self._inner = self.timed(**self._made_of)
        encrypted.set_protocol(self._inner)
        self._inner.connection_made(encrypted)
        if self._early:
            self._inner.data_received(b"".join(self._early))


def tls_handshake(timed: type[TimedProtocol], context: ssl.SSLContext) -> type[TlsHandshake]:
    facts = {"timed": timed, "context": context, "arriving": weakref.WeakSet(), "waiting": {}}
    return type("TlsHandshake", (TlsHandshake,), facts)
