"""How calls begin at a server: those of the cluster's own processes at once, those of strangers with care.

    a process of the cluster   headers with the token -> gRPC reads its message -> the call
    a client                   headers -> let in, or refused -> its message, in time -> the call
    a client's stream          headers -> let in, or refused -> the call, which reads one message after the other
    anybody                    health and reflection: few at once, short messages in little time

What gRPC reads before anybody looks costs memory: a stranger could leave thousands of messages half sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

import grpc
import grpc.aio

from twostroke.base.errors import DeadlineExceeded, Draining, InvalidRequest, Overloaded, ServeError
from twostroke.rpc.connections import Connections

Context = grpc.aio.ServicerContext[Any, Any]
Admit = Callable[[Context], AbstractContextManager[object]]
"""Admits one call for the time of the block. Raises ServeError if it must not be served."""
Check = Callable[[Context], None]
"""Raises ServeError where a call with a stream of requests must not be."""

MESSAGE_S = 60.0
"""Seconds for the message of a call that was let in; HTTP gives as much to a body."""


class Entrance(Protocol):
    unary: Callable[..., grpc.RpcMethodHandler[Any, Any]]
    """Makes a handler of a function that gives one response."""
    streaming: Callable[..., grpc.RpcMethodHandler[Any, Any]]

    def admit(self, context: Context) -> AbstractAsyncContextManager[object]:
        """Admits one call for the time of the block. Raises ServeError."""

    async def message(self, came: Any, context: Context) -> bytes:
        """Returns the request, from what gRPC gave the handler. Raises ServeError."""

    def check(self, context: Context) -> None:
        """Raises ServeError where a call with a stream of requests must not be."""


class OwnEntrance:
    """The entrance of callers with the token of the cluster: gRPC reads their messages itself, which costs least."""

    unary = staticmethod(grpc.unary_unary_rpc_method_handler)
    streaming = staticmethod(grpc.unary_stream_rpc_method_handler)

    def admit(self, context: Context) -> AbstractAsyncContextManager[object]:
        del context
        return contextlib.nullcontext()

    async def message(self, came: Any, context: Context) -> bytes:
        del context
        assert isinstance(came, bytes)
        return came

    def check(self, context: Context) -> None:
        """Checks nothing more: a client that has shown the token may call."""


class StrangersEntrance:
    """To gRPC every call has a stream of requests, so that it reads none before it is asked to."""

    unary = staticmethod(grpc.stream_unary_rpc_method_handler)
    streaming = staticmethod(grpc.stream_stream_rpc_method_handler)

    def __init__(self, admit: Admit, check: Check = lambda context: None) -> None:
        self._admit = admit
        self._check = check

    @contextlib.asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[None]:
        with self._admit(context):
            yield

    async def message(self, came: Any, context: Context) -> bytes:
        del came
        try:
            async with asyncio.timeout(MESSAGE_S):
                return message_of(await context.read())
        except TimeoutError as error:
            raise DeadlineExceeded(f"the message did not arrive within {MESSAGE_S:g} s") from error

    def check(self, context: Context) -> None:
        self._check(context)


def message_of(raw: Any) -> bytes:
    """Returns what gRPC has read, if it is a message."""
    if not isinstance(raw, bytes):
        raise InvalidRequest("the call has no message")
    return raw


def _draining() -> Draining:
    return Draining("this server ends: ask another one")


OPEN_MESSAGE_S = 5.0
"""For a message; those of probes and reflection are short, and come with the headers."""
MOST_UNREAD = 4
"""Messages that may take that long. Where more are waited for, the oldest ones have UNREAD_S."""
UNREAD_S = 0.1
SHARE = 8
"""One in this many of a server's connections may have an open call without an admitted client."""
MOST_OF_KNOWN = 16
"""Open calls of one connection with an admitted client."""


class OpenCalls:
    """The entrance of calls that everybody may make. Few stay open, and few messages are waited for.

    A call takes a place from its headers to its end. Where all places are taken, the oldest call of the connection that
    has most of them ends, so that a newcomer is served; connections with an admitted client keep their calls.
    """

    unary = staticmethod(grpc.stream_unary_rpc_method_handler)
    streaming = staticmethod(grpc.stream_stream_rpc_method_handler)

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._most = max(1, connections.most // SHARE)
        self._numbers = itertools.count()
        self._staying: dict[int, tuple[str, asyncio.Timeout]] = {}
        """Open calls by number, so that the oldest comes first: its connection, and what ends it. One that is ended
        leaves at once: a timeout that has run out cannot be rescheduled.
        """
        self._unread: dict[int, asyncio.Timeout] = {}
        self._is_leaving = False

    def leave(self) -> None:
        """Ends all calls: who watches the health of a server that ends asks another one."""
        self._is_leaving = True
        while self._staying:
            self._staying.popitem()[1][1].reschedule(0.0)

    @contextlib.asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[None]:
        if self._is_leaving:
            raise _draining()
        number = next(self._numbers)
        try:
            async with asyncio.timeout(None) as stay:
                self._staying[number] = context.peer(), stay
                self._make_room()
                yield
        except TimeoutError as error:
            if not stay.expired():
                raise
            if self._is_leaving:
                raise _draining() from error
            raise Overloaded("too many calls that need no key are open: call again", retry_after_s=1.0) from error
        finally:
            self._staying.pop(number, None)

    async def message(self, came: Any, context: Context) -> bytes:
        del came
        return message_of(await self._in_time(context.read()))

    def check(self, context: Context) -> None:
        """Checks nothing: everybody may call."""

    def follow(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns a handler that reads its requests itself, as reflection does."""
        answer: Any = handler.stream_stream  # the stubs know of no async ones

        async def hurried(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[object]:
            try:
                async with self.admit(context):
                    async for response in answer(self._each_in_time(requests), context):
                        yield response
            except ServeError as error:
                await context.abort(grpc.StatusCode[error.grpc_status], error.message)

        return grpc.stream_stream_rpc_method_handler(hurried, handler.request_deserializer, handler.response_serializer)

    async def _each_in_time(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                request = await self._in_time(anext(requests, None))
            except DeadlineExceeded:
                return  # as if the client had said that it is done
            if request is None:
                return
            yield request

    async def _in_time(self, coming: Any) -> Any:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        try:
            async with asyncio.timeout(OPEN_MESSAGE_S) as limit:
                self._unread[number] = limit
                self._hurry(loop.time() + UNREAD_S)
                return await coming
        except TimeoutError as error:
            raise DeadlineExceeded("the message did not arrive in time") from error
        finally:
            self._unread.pop(number, None)

    def _hurry(self, until_s: float) -> None:
        """Ends the oldest waits of too many at this time. One that has run out already ends by itself."""
        for oldest in list(self._unread)[:-MOST_UNREAD]:
            limit = self._unread.pop(oldest)
            if not limit.expired():
                limit.reschedule(until_s)

    def _make_room(self) -> None:
        """Ends calls of strangers above the share, and those of one connection that has far more than it needs."""
        held = Counter(peer for peer, _ in self._staying.values())
        strangers = {peer: count for peer, count in held.items() if not self._connections.is_known(peer)}
        greedy = [peer for peer, count in held.items() if peer not in strangers and count > MOST_OF_KNOWN]
        if sum(strangers.values()) > self._most:
            greedy.append(max(strangers, key=lambda peer: strangers[peer]))
        for peer in greedy:
            number = next(number for number, (other, _) in self._staying.items() if other == peer)
            self._staying.pop(number)[1].reschedule(0.0)
