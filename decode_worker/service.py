"""The Decode rpc service: it validates calls and hands them to the request manager."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import grpc.aio

from decode_worker.request_manager import RequestManager
from twostroke.base.ids import RequestId
from twostroke.rpc.convert import attempt_from_message
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.worker.answers import features_of
from twostroke.worker.branches import Branches
from twostroke.worker.request_validator import RequestValidator

Context = grpc.aio.ServicerContext[object, object]


class DecodeService(worker_pb2_grpc.DecodeServicer):
    def __init__(self, requests: RequestManager, validator: RequestValidator, branches: Branches) -> None:
        self._branches = branches
        self._requests = requests
        self._validator = validator

    async def Open(  # noqa: N802
        self, request: worker_pb2.OpenRequest, context: Context
    ) -> worker_pb2.OpenResponse:
        self._validator.check(request.fingerprint, request.worker_epoch)
        source = request.source if request.HasField("source") else None
        attempt = attempt_from_message(request)
        forecast = request.source_forecast if request.HasField("source_forecast") else None
        features = await features_of(attempt, self._branches.answers)
        self._requests.open(attempt, source, PeerPrefix.of(request), forecast, features)
        if attempt.request.hints:
            for branch in self._branches.each:
                branch.opened(attempt)
        return worker_pb2.OpenResponse()

    async def Close(  # noqa: N802
        self, request: worker_pb2.CloseRequest, context: Context
    ) -> worker_pb2.CloseResponse:
        self._requests.close_request(RequestId(request.request_id), request.attempt)
        return worker_pb2.CloseResponse()

    async def Tokens(  # noqa: N802
        self, request: worker_pb2.TokensRequest, context: Context
    ) -> AsyncGenerator[worker_pb2.TokenBatch, None]:
        async with contextlib.aclosing(self._requests.output_stream(request.router_id).stream()) as batches:
            async for batch in batches:
                yield batch

    async def Attach(  # noqa: N802
        self, request: worker_pb2.AttachRequest, context: Context
    ) -> worker_pb2.AttachResponse:
        if request.new_attempt:
            self._requests.reattach(request)
        else:
            request_id = RequestId(request.request_id)
            self._requests.attach(request_id, request.attempt, request.router_id, request.from_position)
        return worker_pb2.AttachResponse()

    async def Find(  # noqa: N802
        self, request: worker_pb2.FindRequest, context: Context
    ) -> worker_pb2.FindResponse:
        return worker_pb2.FindResponse(requests=self._requests.find(request.stream))
