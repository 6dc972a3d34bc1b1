"""How calls begin at a server: those of the cluster's own processes at once, those of strangers with care.

    a process of the cluster   headers with the token -> gRPC reads its message -> the call
    a client                   headers -> let in, or refused -> its message, in time -> the call
    a client's stream          headers -> let in, or refused -> the call, which reads one message after the other
    anybody (`open_calls`)     health and reflection: few at once, short messages in little time

What gRPC reads before anybody looks costs memory: a stranger could leave thousands of messages half sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

import grpc
import grpc.aio

from twostroke.base.errors import DeadlineExceeded, InvalidRequest

Context = grpc.aio.ServicerContext[Any, Any]
Admit = Callable[[Context], AbstractContextManager[object]]
"""For the time of one call. Raises ServeError where it must not be."""
Check = Callable[[Context], None]
"""Raises ServeError where a call with a stream of requests must not be."""

MESSAGE_S = 60.0
"""For the message of a call that was let in; HTTP gives as much to a body."""


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
    """The entrance of callers that have shown the token of the cluster: gRPC reads their messages by itself, which
    costs least."""

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
