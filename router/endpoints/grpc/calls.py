"""Calls of gRPC clients: their authentication, their metadata, and the messages of their streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from router.auth.auth import AuthContext, Authenticator
from router.grpc_listener.client_names import client_host
from twostroke.rpc.entrance import Context


class AuthenticatedCalls:
    """The open calls, each with who makes it: a call is authenticated before its message is read."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._open: dict[Context, AuthContext] = {}

    @contextlib.contextmanager
    def admit(self, context: Context) -> Iterator[None]:
        """Authenticates a call with one request, until the call ends. Raises InvalidApiKey or RateLimitExceeded."""
        with self.admit_request(context) as auth:
            self._open[context] = auth
            try:
                yield
            finally:
                del self._open[context]

    def auth_of(self, context: Context) -> AuthContext:
        return self._open[context]

    def check(self, context: Context) -> None:
        """Checks the API key of a call with a stream of requests, each of which is admitted by itself.

        Raises InvalidApiKey.
        """
        self._authenticator.check(shown_metadata(context, "authorization") or None)

    def admit_request(self, context: Context) -> AbstractContextManager[AuthContext]:
        """Admits one request of a call, until it ends. Raises InvalidApiKey or RateLimitExceeded."""
        return self._authenticator.admit(shown_metadata(context, "authorization") or None)


def shown_metadata(context: Context, name: str) -> str:
    """Returns the value of a key in a call's metadata. Empty: the key is missing."""
    shown = next((value for key, value in context.invocation_metadata() or () if key == name), "")
    return shown.decode(errors="replace") if isinstance(shown, bytes) else shown


def client_address(context: Context) -> str:
    """Returns the address that a call comes from."""
    return client_host(context.peer())


Message = TypeVar("Message")


class QueuedWriter(Generic[Message]):
    """Writes messages to a gRPC stream, one after the other, in a task: each write has to be awaited."""

    def __init__(self, write: Callable[[Message], Awaitable[None]], beat: Message | None = None) -> None:
        """`beat` is a keep-alive message, for a stream that must not be silent for long."""
        self._write_one = write
        self._beat = beat
        self.turn = asyncio.Lock()
        self._unsent: deque[Message] = deque()
        self._writing: asyncio.Task[None] | None = None
        """The task that writes. None: all messages were written."""
        self.is_started = False
        self.sent_s = time.monotonic()

    @property
    def is_idle(self) -> bool:
        return self._writing is None

    def put(self, message: Message) -> None:
        self._unsent.append(message)

    def flush(self) -> None:
        if self._unsent and self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def drain(self) -> None:
        self.flush()
        if self._writing is not None:
            await self._writing

    async def beat(self) -> None:
        assert self._beat is not None
        self.put(self._beat)
        await self.drain()

    async def close(self) -> None:
        """Drops the messages that are not written yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while self._unsent:
            await self._write_one(self._unsent.popleft())
            self.is_started = True
            self.sent_s = time.monotonic()
        self._writing = None
