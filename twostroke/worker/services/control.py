"""The Control service of a worker reports its identity, its load and the blocks that it holds."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

import grpc.aio

from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import WorkerId
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.memory import PageMemory
from twostroke.rpc.events import batch_to_message
from twostroke.rpc.profiles import ProfiledParts, profile_here
from twostroke.rpc.traces import known_of
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc
from twostroke.worker.host import WorkerHost
from twostroke.worker.measured.machine_limits import limits_of

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[object, object]


class WorkerControlService(control_pb2_grpc.ControlServicer):
    def __init__(
        self, host: WorkerHost, drain: Callable[[float, Sequence[control_pb2.Successor]], Awaitable[int]]
    ) -> None:
        self._host = host
        self._drain = drain

    async def GetServerInfo(  # noqa: N802
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.ServerInfo:
        return self._host.server_info()

    async def GetModelInfo(  # noqa: N802
        self, request: control_pb2.GetModelInfoRequest, context: Context
    ) -> control_pb2.ModelInfo:
        return self._host.model_info()

    async def GetLoad(  # noqa: N802
        self, request: control_pb2.GetLoadRequest, context: Context
    ) -> control_pb2.GetLoadResponse:
        load = control_pb2.WorkerLoad(worker_id=self._host.config.worker_id, load=self._host.load_report())
        return control_pb2.GetLoadResponse(workers=[load])

    async def SubscribeKvEvents(  # noqa: N802
        self, request: control_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[control_pb2.KvEventBatch]:
        host = self._host
        async for batch in host.feed.follow(request.epoch, request.start_sequence):
            if reach(Point.WORKER_EVENTS):
                continue
            yield batch_to_message(WorkerId(host.config.worker_id), host.epoch, batch, host.load_report())

    async def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        return control_pb2.DrainResponse(open_requests=await self._drain(request.deadline_s, request.successors))

    async def GetTrace(  # noqa: N802
        self, request: control_pb2.GetTraceRequest, context: Context
    ) -> control_pb2.GetTraceResponse:
        return known_of(self._host.recorder, request.name)

    async def Profile(  # noqa: N802
        self, request: control_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[control_pb2.ProfilePart]:
        host, engine = self._host, self._host.engine
        profiled = ProfiledParts(
            host.config.role.value,
            host.recorder,
            engine.profiler,
            partial(engine.between_steps, time.monotonic_ns),
            partial(limits_of, host.config, engine, is_on_cpu=isinstance(host.memory, PageMemory)),
        )
        async with aclosing(profile_here(profiled, request.seconds)) as parts:
            async for part in parts:
                yield part

    async def ForgetCached(  # noqa: N802
        self, request: control_pb2.ForgetCachedRequest, context: Context
    ) -> control_pb2.ForgetCachedResponse:
        blocks = self._host.pool.forget_cached() + sum(each.forget_cached() for each in self._host.branches.each)
        pinned = self._host.pool.count(PageState.PINNED)
        self._host.feed.publish_changes()
        log.info("cached blocks forgotten blocks=%d pinned=%d", blocks, pinned)
        return control_pb2.ForgetCachedResponse(blocks=blocks, pinned=pinned)
