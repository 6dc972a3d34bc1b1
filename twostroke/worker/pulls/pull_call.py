"""The puller reads its Pull call all the time, so that it notices a silent source even during copies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc.aio

from twostroke.base.errors import PeerLost, TransferFailed
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import worker_pb2

PullCall = grpc.aio.UnaryStreamCall[worker_pb2.PullRequest, worker_pb2.PullResponse]


@contextlib.asynccontextmanager
async def pull_responses(call: PullCall, source: str, silence_s: float) -> AsyncGenerator[Responses, None]:
    """Yields the call's responses; cancels the body and raises PeerLost when the source was silent for `silence_s`.

    The call, which is the lease, ends with the context.
    """
    limit = asyncio.timeout(None)
    responses = Responses(source)
    reader = asyncio.create_task(_read(call, responses, silence_s, limit), name=f"pull from {source}")
    try:
        async with limit:
            yield responses
    except TimeoutError:
        if not limit.expired():
            raise
        raise PeerLost(f"{source} was silent for {silence_s:g} s during a pull") from None
    finally:
        call.cancel()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


class Responses:
    """Queue of unread responses; it holds at most one message per block."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._queue: asyncio.Queue[worker_pb2.PullResponse | BaseException] = asyncio.Queue()

    def put(self, response: worker_pb2.PullResponse | BaseException) -> None:
        self._queue.put_nowait(response)

    async def next(self) -> worker_pb2.PullResponse:
        """Returns the next response. A source keeps the call open, so an end of the call raises."""
        response = await self._queue.get()
        if isinstance(response, asyncio.CancelledError):
            raise PeerLost(f"{self.source}: the connection was closed")
        if isinstance(response, BaseException):
            raise response
        return response


async def _read(call: PullCall, responses: Responses, silence_s: float, limit: asyncio.Timeout) -> None:
    try:
        async with listening(silence_s) as heard:
            while isinstance(message := await call.read(), worker_pb2.PullResponse):
                heard()
                if not message.HasField("alive"):
                    responses.put(message)
        raise TransferFailed(f"{responses.source} ended the pull before all pages were announced")
    except TimeoutError:
        limit.reschedule(asyncio.get_running_loop().time())
    except (Exception, asyncio.CancelledError) as error:
        responses.put(error)
