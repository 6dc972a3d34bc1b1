"""The WorkerAdapters rpc service: the supervisor says to which adapters names lead."""

from __future__ import annotations

import grpc.aio

from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc
from twostroke.worker.adapters.cache import AdapterCache

Context = grpc.aio.ServicerContext[object, object]


class WorkerAdaptersService(adapters_pb2_grpc.WorkerAdaptersServicer):
    def __init__(self, adapters: AdapterCache) -> None:
        self._adapters = adapters

    async def Keep(  # noqa: N802  # the name in the .proto
        self, request: adapters_pb2.KeepAdaptersRequest, context: Context
    ) -> adapters_pb2.KeepAdaptersResponse:
        self._adapters.keep_only(request.digests)
        return adapters_pb2.KeepAdaptersResponse()
