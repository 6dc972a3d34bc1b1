"""The puller's end of one Pull call is read all the time, so that a silent source is noticed even during copies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc.aio

from twostroke.errors import PeerLost, TransferFailed
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import worker_pb2

PullCall = grpc.aio.UnaryStreamCall[worker_pb2.PullRequest, worker_pb2.PullResponse]


@contextlib.asynccontextmanager
async def hearing(call: PullCall, source: str, silence_s: float) -> AsyncGenerator[Responses, None]:
    """Yield the call's responses; raise PeerLost inside when the source has been silent for `silence_s`.

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
    """Unread responses of the source: at most one message for each block."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._queue: asyncio.Queue[worker_pb2.PullResponse | BaseException] = asyncio.Queue()

    def put(self, said: worker_pb2.PullResponse | BaseException) -> None:
        self._queue.put_nowait(said)

    async def next(self) -> worker_pb2.PullResponse:
        """Return the next response. Raises what ended the call, because a source keeps it open."""
        said = await self._queue.get()
        if isinstance(said, asyncio.CancelledError):
            raise PeerLost(f"{self.source}: the connection was closed")
        if isinstance(said, BaseException):
            raise said
        return said


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
