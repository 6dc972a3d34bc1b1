"""How calls begin at a server: those of the cluster's own processes at once, those of strangers with care.

    a process of the cluster   gRPC reads its message, then the call is looked at
    a stranger                 headers -> let in, or refused -> its message, in time -> the call

What gRPC reads before anybody looks costs memory: a stranger could leave thousands of messages half sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import grpc
import grpc.aio

from twostroke.errors import DeadlineExceeded, InvalidRequest

Context = grpc.aio.ServicerContext[Any, Any]
Admit = Callable[[Context], AbstractContextManager[object]]
"""For the time of one call. Raises ServeError where it must not be."""

MESSAGE_S = 60.0
"""For the message of a call that was let in; HTTP gives as much to a body."""
OPEN_MESSAGE_S = 5.0
"""Where everybody may call: probes and reflection, whose messages are short."""


class Entrance(Protocol):
    unary: Callable[..., grpc.RpcMethodHandler[Any, Any]]
    """Makes a handler of a function that gives one response."""
    streaming: Callable[..., grpc.RpcMethodHandler[Any, Any]]

    def admit(self, context: Context, is_open: bool) -> AbstractContextManager[object]:
        """For the time of one call. `is_open`: everybody may call this. Raises ServeError."""

    async def message(self, came: Any, context: Context, is_open: bool) -> bytes:
        """The request, from what gRPC gave the handler. Raises ServeError."""

    def follow(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """For one that reads its requests itself."""


class OwnEntrance:
    """Of who has shown the cluster's token, or will in a moment."""

    unary = staticmethod(grpc.unary_unary_rpc_method_handler)
    streaming = staticmethod(grpc.unary_stream_rpc_method_handler)

    def admit(self, context: Context, is_open: bool) -> AbstractContextManager[object]:
        del context, is_open
        return contextlib.nullcontext()

    async def message(self, came: Any, context: Context, is_open: bool) -> bytes:
        del context, is_open
        assert isinstance(came, bytes)
        return came

    def follow(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        return handler


class StrangersEntrance:
    """To gRPC every call has a stream of requests, so that it reads none before it is asked to."""

    unary = staticmethod(grpc.stream_unary_rpc_method_handler)
    streaming = staticmethod(grpc.stream_stream_rpc_method_handler)

    def __init__(self, admit: Admit) -> None:
        self._admit = admit

    def admit(self, context: Context, is_open: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if is_open else self._admit(context)

    async def message(self, came: Any, context: Context, is_open: bool) -> bytes:
        del came
        limit_s = OPEN_MESSAGE_S if is_open else MESSAGE_S
        try:
            async with asyncio.timeout(limit_s):
                raw = await context.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the message did not arrive within {limit_s:g} s") from error
        if not isinstance(raw, bytes):
            raise InvalidRequest("the call has no message")
        return raw

    def follow(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        answer: Any = handler.stream_stream  # that of reflection; the stubs know of no async ones

        async def hurried(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[object]:
            async for response in answer(_each_in_time(requests), context):
                yield response

        return grpc.stream_stream_rpc_method_handler(hurried, handler.request_deserializer, handler.response_serializer)


async def _each_in_time(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    while True:
        try:
            async with asyncio.timeout(OPEN_MESSAGE_S):
                request = await anext(requests, None)
        except TimeoutError:
            return  # as if the client had said that it is done
        if request is None:
            return
        yield request
