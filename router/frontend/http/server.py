"""uvicorn as a router needs it: says when it is up, leaves signals to others, and can go without refusing anybody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.frontend.http.protocol import HEADERS_S, TimedProtocol, timed_protocol
from twostroke.tls import Certificates

KEEP_ALIVE_S = 75
"""Longer than load balancers keep idle connections: the side that opened a connection should be the one to close it."""
LINGER_S = 20.0
"""For connections that nobody uses: clients drop idle ones earlier (httpx after 5 s, aiohttp after 15 s), so none is
closed while a request is on its way over it."""
HANDSHAKE_S = 2.0
"""For those whom a router that leaves has accepted: strangers that say nothing must not hold it up for longer."""
LOOK_S = 0.05
"""uvicorn has no event for the end of a connection."""


def http_config(
    app: ASGIApp, *, grace_s: int, most_connections: int, certificates: Certificates | None = None
) -> uvicorn.Config:
    timed = timed_protocol(most_connections)
    return uvicorn.Config(
        app,
        http=timed if certificates is None else sealed_arrival(timed, certificates.renewing_server()),
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
    )


class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        self._farewell = Farewell(config.app)  # type: ignore[arg-type]  # an application, not its name
        config.app = self._farewell
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        protocol = self.config.http_protocol_class
        if issubclass(protocol, SealedArrival):
            for transport in list(protocol.waiting.values()):
                transport.abort()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def leave(self, grace_s: float) -> None:
        """Accept nothing more, and end every connection with its next answer. Returns when all have ended, or after
        `grace_s`. Connections that nobody has accepted yet are left to whoever shares the listening socket.

        What is answered now is not the end of its connection, as its client was not told: it may be asking again.
        """
        await self._stop_accepting()
        self._farewell.is_said = True
        idle_since_s: dict[TimedProtocol, float] = {}
        begun_s = time.monotonic()
        while (passed_s := time.monotonic() - begun_s) < grace_s:
            if not self.server_state.connections and not (passed_s < HANDSHAKE_S and self.is_arriving):
                return
            self._close_idle(idle_since_s, time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def _stop_accepting(self) -> None:
        """A socket that was accepted becomes a connection some turns of the event loop later; asyncio forgets it,
        unanswered, where its server is closed by then."""
        for server in self.servers:
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(LOOK_S)
        for server in self.servers:
            server.close()

    def _close_idle(self, idle_since_s: dict[TimedProtocol, float], now_s: float) -> None:
        for connection in self._connections():
            if connection.is_served:
                idle_since_s.pop(connection, None)
            elif idle_since_s.setdefault(connection, now_s) + LINGER_S < now_s:
                connection.shutdown()

    @property
    def is_arriving(self) -> bool:
        """Somebody was accepted here whose handshake is not over."""
        protocol = self.config.http_protocol_class
        return issubclass(protocol, TimedProtocol | SealedArrival) and len(protocol.arriving) > 0

    def _connections(self) -> list[TimedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, TimedProtocol)]


class Farewell:
    """Once it is said, every response is the last one of its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.is_said = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if self.is_said and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last)


class SealedArrival(asyncio.Protocol):
    timed: ClassVar[type[TimedProtocol]]
    """What it becomes."""
    context: ClassVar[ssl.SSLContext]
    arriving: ClassVar[weakref.WeakSet[SealedArrival]]
    """Those that are accepted, and shake hands still."""
    waiting: ClassVar[dict[SealedArrival, asyncio.Transport]]
    """The oldest comes first."""

    def __init__(self, **made_of: Any) -> None:
        self._made_of = made_of
        self._early: list[bytes] = []
        """What came right behind the handshake."""
        self._inner: TimedProtocol | None = None
        self._is_lost = False
        self.arriving.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # what comes is for the handshake
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
            sealed = await asyncio.get_running_loop().start_tls(
                transport, self, self.context, server_side=True, ssl_handshake_timeout=HEADERS_S
            )
        except OSError as error:  # of TLS, too: whoever it was has been told what can be told
            # The error and its frames hold each other, and with them a quarter of a megabyte for the cipher.
            traceback.clear_frames(error.__traceback__)
            return
        finally:
            self.waiting.pop(self, None)
            self.arriving.discard(self)
        if sealed is None or self._is_lost:
            return
        self._inner = self.timed(**self._made_of)
        sealed.set_protocol(self._inner)
        self._inner.connection_made(sealed)
        if self._early:
            self._inner.data_received(b"".join(self._early))


def sealed_arrival(timed: type[TimedProtocol], context: ssl.SSLContext) -> type[SealedArrival]:
    facts = {"timed": timed, "context": context, "arriving": weakref.WeakSet(), "waiting": {}}
    return type("SealedArrival", (SealedArrival,), facts)
