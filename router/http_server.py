"""uvicorn as a router needs it: says when it is up, leaves signals to others, and can go without refusing anybody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LINGER_S = 20.0
"""For connections that nobody uses: clients drop idle ones earlier (httpx after 5 s, aiohttp after 15 s), so none is
closed while a request is on its way over it."""
LOOK_S = 0.05
"""uvicorn has no event for the end of a connection."""


class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        self._farewell = Farewell(config.app)  # type: ignore[arg-type]  # an application, not its name
        config.app = self._farewell
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def leave(self, grace_s: float) -> None:
        """Accept nothing more, and answer every connection once more at most. Returns when all are closed, or after
        `grace_s`. Connections that nobody has accepted yet are left to whoever shares the listening socket."""
        begun_s = time.monotonic()
        for server in self.servers:
            server.close()
        self._farewell.is_said = True
        for connection in self._connections():
            if connection.cycle is not None:
                connection.cycle.keep_alive = False
        while (passed_s := time.monotonic() - begun_s) < grace_s and self.server_state.connections:
            if passed_s > LINGER_S:
                self._close_idle()
            await asyncio.sleep(LOOK_S)

    def _close_idle(self) -> None:
        for connection in self._connections():
            if connection.cycle is None or connection.cycle.response_complete:
                connection.shutdown()

    def _connections(self) -> list[H11Protocol]:
        return [each for each in self.server_state.connections if isinstance(each, H11Protocol)]


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
