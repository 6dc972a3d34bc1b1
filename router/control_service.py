"""The Control service of a router: operators read facts about it and its workers, and drain or profile them."""

# ruff: noqa: N802  # methods have the names that the .proto gives them

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib import metadata
from typing import Any

import grpc.aio

from router.addresses import Addresses
from router.fleet.worker import SAME_FACTS
from router.requests.request_handler import RequestHandler
from twostroke.base.errors import InvalidRequest, PeerLost
from twostroke.base.ids import Epoch
from twostroke.config import Role
from twostroke.rpc.clock import machine_name
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RouterControlService(control_pb2_grpc.ControlServicer):
    """Answers for the router itself and, about the model and its load, for all of its workers."""

    def __init__(self, handler: RequestHandler, addresses: Addresses, *, router_id: str, epoch: Epoch) -> None:
        self._handler = handler
        self._addresses = addresses
        self._router_id = router_id
        self._epoch = epoch

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.ServerInfo:
        return control_pb2.ServerInfo(
            server_id=self._router_id,
            role=Role.ROUTER.value,
            epoch=str(self._epoch),
            fingerprint=self._fingerprint(),
            version=metadata.version("twostroke"),
            state=self._state(),
            metrics_address=self._addresses.metrics,
            http_address=self._addresses.http,
            grpc_address=self._addresses.grpc,
            clock_ns=time.monotonic_ns(),
            machine=machine_name(),
        )

    async def GetModelInfo(self, request: control_pb2.GetModelInfoRequest, context: Context) -> control_pb2.ModelInfo:
        facts = self._handler.dispatcher.facts
        return control_pb2.ModelInfo(
            **{name: getattr(facts, name) for name in SAME_FACTS if name != "model"},
            model=self._handler.model,
            eos_token_ids=facts.eos_token_ids,
            kv_format=facts.kv_form.format,
            kv_converted_from=facts.kv_form.converted_from or "",
            pool_pages=facts.pool_pages,
        )

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: Context) -> control_pb2.GetLoadResponse:
        return control_pb2.GetLoadResponse(workers=self._handler.dispatcher.operations.loads())

    async def SubscribeKvEvents(
        self, request: control_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[control_pb2.KvEventBatch]:
        async for batch in self._handler.dispatcher.operations.subscribe(request):
            yield batch

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.DrainResponse:
        if not (math.isfinite(request.deadline_s) and request.deadline_s >= 0):
            raise InvalidRequest(
                f"deadline_s must be a number of seconds from now, 0 or more, got {request.deadline_s}",
                field="deadline_s",
            )
        left = await self._handler.dispatcher.drain(time.time() + request.deadline_s)
        return control_pb2.DrainResponse(open_requests=left)

    async def ForgetCached(
        self, request: control_pb2.ForgetCachedRequest, context: Context
    ) -> control_pb2.ForgetCachedResponse:
        return await self._handler.dispatcher.operations.forget_cached()

    async def GetTrace(self, request: control_pb2.GetTraceRequest, context: Context) -> control_pb2.GetTraceResponse:
        return await self._handler.dispatcher.operations.trace(request.name)

    async def Profile(
        self, request: control_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[control_pb2.ProfilePart]:
        async with aclosing(self._handler.dispatcher.operations.profile(request)) as parts:
            async for part in parts:
                yield part

    def _fingerprint(self) -> str:
        try:
            return self._handler.dispatcher.facts.fingerprint
        except PeerLost:
            return ""

    def _state(self) -> control_pb2.WorkerState:
        if self._handler.dispatcher.is_draining:
            return control_pb2.WORKER_STATE_DRAINING
        if self._handler.dispatcher.is_ready:
            return control_pb2.WORKER_STATE_SERVING
        return control_pb2.WORKER_STATE_STARTING
