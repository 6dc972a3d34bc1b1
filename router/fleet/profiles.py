"""Profiles of all workers at once, their clocks set against the router's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio

from router.fleet.worker import Worker
from twostroke.base.errors import ServeError
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.clock import ClockOffset, introduced
from twostroke.rpc.membership import Membership
from twostroke.rpc.profiles import ANSWER_S
from twostroke.rpc.v1.control_pb2 import ProfilePart, ProfileRequest
from twostroke.rpc.v1.control_pb2_grpc import ControlStub

Parts = AsyncGenerator[ProfilePart, None]


@asynccontextmanager
async def recording_at(
    workers: Sequence[Worker], membership: Membership, seconds: float
) -> AsyncIterator[Sequence[Parts]]:
    """Yields the parts of each worker. Workers record from here on, and until the block ends at most.

    Parts that are not read yet wait at their workers.
    """
    channels = [PeerChannel(worker.address, membership) for worker in workers]
    async with AsyncExitStack() as stack:
        for channel in channels:
            stack.push_async_callback(channel.close)
        clocks = await asyncio.gather(*map(_clock_of, channels))
        calls = [_call(channel, seconds) for channel in channels]
        for call in calls:
            stack.callback(call.cancel)
        each = zip(workers, channels, clocks, calls, strict=True)
        yield [_parts_of(worker, channel.address, clock, call) for worker, channel, clock, call in each]


async def _clock_of(channel: PeerChannel) -> ClockOffset | ServeError:
    try:
        return (await introduced(channel))[1]
    except ServeError as error:
        return error


def _call(channel: PeerChannel, seconds: float) -> Any:
    request = ProfileRequest(seconds=seconds)
    return ControlStub(channel.channel).Profile(request, metadata=channel.metadata, timeout=seconds + ANSWER_S)


async def _parts_of(worker: Worker, address: str, clock: ClockOffset | ServeError, call: Any) -> Parts:
    try:
        if isinstance(clock, ServeError):
            raise clock
        async for part in call:
            if part.HasField("about"):
                part.about.clock_offset_ns, part.about.clock_error_ns = clock.offset_ns, clock.error_ns
            yield part
    except grpc.aio.AioRpcError as error:
        yield ProfilePart(process=worker.worker_id, failure=str(error_of(error, address)))
    except ServeError as error:
        yield ProfilePart(process=worker.worker_id, failure=str(error))
