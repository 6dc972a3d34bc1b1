"""An OpenTelemetry collector: OTLP/gRPC in, spans in a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    services: dict[bytes, str] = field(default_factory=dict)
    """Span id -> the process that sent it."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def Export(self, request, context):  # noqa: N802
        for of_process in request.resource_spans:
            process = values_of(of_process.resource.attributes)["service.instance.id"]
            for scope in of_process.scope_spans:
                self.spans += scope.spans
                self.services |= {span.span_id: process for span in scope.spans}
        self._changed.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, is_there: Callable[[list[Span]], bool], within_s: float = 60) -> None:
        async with asyncio.timeout(within_s):
            while not is_there(self.spans):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


def values_of(attributes: list[KeyValue]) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
