"""Calls of operators about the whole fleet: loads, KV events, traces, profiles, and clearing the prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc.aio

from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.metrics import ROLE
from router.routing.routing_state import RoutingState
from twostroke.base.errors import ServeError
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.observability.profiler import Profiler
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.clock import ClockOffset, introduced
from twostroke.rpc.membership import Membership
from twostroke.rpc.profiles import ANSWER_S, ProfiledParts, profile_here
from twostroke.rpc.traces import known_of
from twostroke.rpc.v1 import control_pb2, routing_pb2
from twostroke.rpc.v1.control_pb2 import ProfilePart, ProfileRequest
from twostroke.rpc.v1.control_pb2_grpc import ControlStub
from twostroke.rpc.v1.routing_pb2_grpc import RoutingStub
from twostroke.tracing.recorder import Recorder

CALL_TIMEOUT_S = 5.0
"""Deadline of each call to a worker or router, in seconds. None of them computes anything."""


class Operations:
    """Answers operators, for this router and on behalf of its workers."""

    def __init__(self, fleet: Fleet, routing: RoutingState, membership: Membership, recorder: Recorder) -> None:
        self._fleet = fleet
        self._routing = routing
        self._membership = membership
        self._recorder = recorder
        self._profiler = Profiler()

    def loads(self) -> list[control_pb2.WorkerLoad]:
        return self._fleet.loads()

    def workers(self) -> Sequence[Worker]:
        """Returns the fleet's own objects: read them at once, and do not keep them."""
        return self._fleet.workers

    def holders(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, tuple[int, ...]]:
        """Returns for each worker how many of the leading blocks it holds, in total down to each tier."""
        return self._routing.index.leading_blocks(hashes, tail_blocks=self._fleet.facts.tail_blocks)

    def subscribe(self, request: control_pb2.SubscribeKvEventsRequest) -> AsyncIterator[control_pb2.KvEventBatch]:
        return self._routing.relay.subscribe(request)

    async def forget_cached(self) -> control_pb2.ForgetCachedResponse:
        """Has every worker forget the cached blocks that no request uses and no pin keeps. Returns how many those were,
        and how many a pin has kept.

        Raises the first error of a worker. Even then, all others have forgotten theirs.
        """
        results = await self._call_all(lambda stub: stub.ForgetCached, control_pb2.ForgetCachedRequest())
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return control_pb2.ForgetCachedResponse(
            blocks=sum(result.blocks for result in results), pinned=sum(result.pinned for result in results)
        )

    async def trace(self, name: str) -> control_pb2.GetTraceResponse:
        """Returns the spans that this router and its workers have of a request or stream, and names silent workers."""
        known, workers = known_of(self._recorder, name), self._fleet.workers
        results = await self._call_all(
            lambda stub: stub.GetTrace, control_pb2.GetTraceRequest(name=known.stream or name)
        )
        answers = [result for result in results if isinstance(result, control_pb2.GetTraceResponse)]
        for one in answers:
            known.stream = known.stream or one.stream
            known.forgotten = known.forgotten or one.forgotten
        known.spans.extend(span for one in answers if one.stream == known.stream for span in one.spans)
        silent = (w.worker_id for w, one in zip(workers, results, strict=True) if isinstance(one, BaseException))
        known.silent.extend(silent)
        return known

    async def profile(self, request: control_pb2.ProfileRequest) -> AsyncGenerator[control_pb2.ProfilePart, None]:
        """Records a profile for some seconds, here and at the workers. Then yields it, process by process."""
        workers = () if request.alone else self._fleet.workers
        async with recording_at(workers, self._membership, request.seconds) as others:
            own = profile_here(ProfiledParts(ROLE, self._recorder, self._profiler), request.seconds)
            for parts in (own, *others):
                async with aclosing(parts):
                    async for part in parts:
                        yield part

    async def abort_elsewhere(self, request_id: str, resume_token: str, tenant: str | None) -> bool:
        """Ends a request that is open at another router. Returns False if no router that answers has it."""
        request = routing_pb2.AbortHereRequest(request_id=request_id, resume_token=resume_token, tenant=tenant)
        calls = (
            self._call(address, lambda channel: RoutingStub(channel).AbortHere, request)
            for address in self._routing.other_routers
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        return any(isinstance(result, routing_pb2.AbortHereResponse) and result.found for result in results)

    async def _call_all(self, method: Callable[[ControlStub], Any], request: Any) -> list[Any]:
        """Returns each worker's response or error."""
        calls = (
            self._call(worker.address, lambda channel: method(ControlStub(channel)), request)
            for worker in self._fleet.workers
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, address: str, method: Callable[[grpc.aio.Channel], Any], request: Any) -> Any:
        channel = PeerChannel(address, self._membership)
        try:
            return await channel.call(method(channel.channel), request, CALL_TIMEOUT_S)
        finally:
            await channel.close()


Parts = AsyncGenerator[ProfilePart, None]


@asynccontextmanager
async def recording_at(
    workers: Sequence[Worker], membership: Membership, seconds: float
) -> AsyncIterator[Sequence[Parts]]:
    """Yields the profile of each worker, in parts. Workers record from here on, at most until the block ends.

    Parts wait at their workers until they are read.
    """
    channels = [PeerChannel(worker.address, membership) for worker in workers]
    async with AsyncExitStack() as stack:
        for channel in channels:
            stack.push_async_callback(channel.close)
        clocks = await asyncio.gather(*map(_clock_of, channels))
        request, timeout_s = ProfileRequest(seconds=seconds), seconds + ANSWER_S
        calls = [
            ControlStub(channel.channel).Profile(request, metadata=channel.metadata, timeout=timeout_s)
            for channel in channels
        ]
        for call in calls:
            stack.callback(call.cancel)
        each = zip(workers, channels, clocks, calls, strict=True)
        yield [_parts_of(worker, channel.address, clock, call) for worker, channel, clock, call in each]


async def _clock_of(channel: PeerChannel) -> ClockOffset | ServeError:
    try:
        return (await introduced(channel))[1]
    except ServeError as error:
        return error


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
