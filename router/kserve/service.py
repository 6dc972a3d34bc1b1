"""KServe's protocol v2 over gRPC: inference.GRPCInferenceService."""

# ruff: noqa: N802  # methods have the names that the .proto gives them

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format

from router.dialects.kserve.description import model_config, model_metadata, server_metadata
from router.dialects.kserve.schema import check_version
from router.endpoints.grpc.calls import AuthenticatedCalls
from router.kserve.pages import KServePages, is_ready
from router.kserve.request_stream import RequestStream, infer_whole
from router.requests.request_handler import RequestHandler
from router.server_branch import RouterBranch, RouterParts
from twostroke.base.errors import Draining, NotFound
from twostroke.rpc.entrance import Context
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import kserve_pb2 as kserve

SERVICE_NAME = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_Named = kserve.ModelReadyRequest | kserve.ModelMetadataRequest | kserve.ModelConfigRequest


class KServe(RouterBranch):
    services = (SERVICE_NAME,)
    open_methods = tuple(f"/{SERVICE_NAME}/{name}" for name in ("ServerLive", "ServerReady"))
    """Methods that need no API key, like /live and /ready."""

    def __init__(self, parts: RouterParts) -> None:
        self._service = KServeService(parts.handler, parts.calls)
        self.pages = KServePages(parts.handler).pages()

    def serve(self, rpc: RpcServer) -> None:
        self._service.add_to(rpc.server)

    def leave(self) -> None:
        self._service.leave()


class KServeService:
    """Serves authenticated calls. ModelInfer and ModelStreamInfer get bytes: parsing a large request takes long."""

    def __init__(self, handler: RequestHandler, calls: AuthenticatedCalls) -> None:
        self._handler = handler
        self._calls = calls
        self._streams: set[RequestStream] = set()
        self._is_leaving = False

    def leave(self) -> None:
        """Ends streams of requests without an open one, and the others when they have none."""
        self._is_leaving = True
        for stream in self._streams:
            stream.leave()

    async def ServerLive(self, request: kserve.ServerLiveRequest, context: Context) -> kserve.ServerLiveResponse:
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(self, request: kserve.ServerReadyRequest, context: Context) -> kserve.ServerReadyResponse:
        return kserve.ServerReadyResponse(ready=is_ready(self._handler))

    async def ModelReady(self, request: kserve.ModelReadyRequest, context: Context) -> kserve.ModelReadyResponse:
        try:
            self._name(request)
        except NotFound:
            return kserve.ModelReadyResponse(ready=False)
        return kserve.ModelReadyResponse(ready=is_ready(self._handler))

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest, context: Context
    ) -> kserve.ServerMetadataResponse:
        return kserve.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        return kserve.ModelMetadataResponse(**model_metadata(self._name(request)))

    async def ModelConfig(self, request: kserve.ModelConfigRequest, context: Context) -> kserve.ModelConfigResponse:
        response = kserve.ModelConfigResponse()
        json_format.ParseDict({"config": model_config(self._name(request))}, response)
        return response

    async def ModelInfer(self, raw: bytes, context: Context) -> kserve.ModelInferResponse:
        received_s = time.monotonic()
        return await infer_whole(self._handler, raw, self._calls.auth_of(context), context, received_s)

    async def ModelStreamInfer(self, context: Context) -> None:
        """Reads requests and writes responses until the client ends the stream."""
        if self._is_leaving:
            raise Draining("this router takes no new streams: it is shutting down")
        stream = RequestStream(self._handler, self._calls, context)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    def add_to(self, server: grpc.aio.Server) -> None:
        unary: Mapping[str, tuple[Any, Any]] = {
            "ServerLive": (self.ServerLive, kserve.ServerLiveRequest),
            "ServerReady": (self.ServerReady, kserve.ServerReadyRequest),
            "ModelReady": (self.ModelReady, kserve.ModelReadyRequest),
            "ServerMetadata": (self.ServerMetadata, kserve.ServerMetadataRequest),
            "ModelMetadata": (self.ModelMetadata, kserve.ModelMetadataRequest),
            "ModelConfig": (self.ModelConfig, kserve.ModelConfigRequest),
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(method, kind.FromString, _serialized)
            for name, (method, kind) in unary.items()
        }
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self.ModelInfer, response_serializer=_serialized)
        streamed: Any = self.ModelStreamInfer  # the funnel calls it with only the context
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(streamed, response_serializer=_serialized)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def _name(self, request: _Named) -> str:
        """Returns the model's name. Raises NotFound if no such model is served in that version."""
        self._handler.named(request.name)
        check_version(request.version)
        return request.name or self._handler.model


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
