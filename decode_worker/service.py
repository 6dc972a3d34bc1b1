"""The Decode rpc: thin; the book does the work."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Protocol

import grpc.aio

from decode_worker.outbox import Outbox
from twostroke.ids import RequestId
from twostroke.request import Request
from twostroke.rpc.convert import request_from_message
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.worker.gate import Gate

Context = grpc.aio.ServicerContext[object, object]


class Answers(Protocol):
    """What the service needs of the book."""

    def open(self, request: Request, source: worker_pb2.PageSource | None, peer: PeerPrefix | None) -> None: ...

    def close_request(self, request_id: RequestId, attempt: int) -> None: ...

    def attach(self, request_id: RequestId, attempt: int, router_id: str, from_position: int) -> None: ...

    def take_over(self, wanted: worker_pb2.AttachRequest) -> None: ...

    def find(self, stream: str) -> list[worker_pb2.FoundAnswer]: ...

    def outbox(self, router_id: str) -> Outbox: ...


class DecodeService(worker_pb2_grpc.DecodeServicer):
    def __init__(self, answers: Answers, gate: Gate) -> None:
        self._answers = answers
        self._gate = gate

    async def Open(  # noqa: N802
        self, request: worker_pb2.OpenRequest, context: Context
    ) -> worker_pb2.OpenResponse:
        self._gate.check(request.fingerprint, request.worker_epoch)
        source = request.source if request.HasField("source") else None
        self._answers.open(request_from_message(request), source, PeerPrefix.of(request))
        return worker_pb2.OpenResponse()

    async def Close(  # noqa: N802
        self, request: worker_pb2.CloseRequest, context: Context
    ) -> worker_pb2.CloseResponse:
        self._answers.close_request(RequestId(request.request_id), request.attempt)
        return worker_pb2.CloseResponse()

    async def Tokens(  # noqa: N802
        self, request: worker_pb2.TokensRequest, context: Context
    ) -> AsyncGenerator[worker_pb2.TokenBatch, None]:
        async with contextlib.aclosing(self._answers.outbox(request.router_id).stream()) as batches:
            async for batch in batches:
                yield batch

    async def Attach(  # noqa: N802
        self, request: worker_pb2.AttachRequest, context: Context
    ) -> worker_pb2.AttachResponse:
        if request.take_as:
            self._answers.take_over(request)
        else:
            request_id = RequestId(request.request_id)
            self._answers.attach(request_id, request.attempt, request.router_id, request.from_position)
        return worker_pb2.AttachResponse()

    async def Find(  # noqa: N802
        self, request: worker_pb2.FindRequest, context: Context
    ) -> worker_pb2.FindResponse:
        return worker_pb2.FindResponse(answers=self._answers.find(request.stream))
