"""What everybody may ask a server: how its services are (health), and what they are (reflection).

Clients such as grpcurl ask for reflection in the version of today, v1, or in v1alpha. Both have the same messages, byte
for byte; grpcio-reflection has code for v1alpha only, which serves both here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

HEALTH_NAME = health.SERVICE_NAME
REFLECTION_NAME = "grpc.reflection.v1.ServerReflection"
_FILE = "grpc/reflection/v1/reflection.proto"


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]  # it comes without types
    """grpcio-health-checking's, and `List`, which that has no code for."""

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: Any
    ) -> health_pb2.HealthListResponse:
        del request, context
        statuses = {
            service: health_pb2.HealthCheckResponse(status=status) for service, status in self._server_status.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)


def serve_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Tells of `services`, of health, and of reflection itself."""
    _describe_v1()
    servicer: Any = aio.ReflectionServicer((*services, HEALTH_NAME, REFLECTION_NAME, reflection.SERVICE_NAME))
    for name in (REFLECTION_NAME, reflection.SERVICE_NAME):
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
        )


def _describe_v1() -> None:
    """Describes v1 by v1alpha's file under the other name."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        _rename(file)
        pool.AddSerializedFile(file.SerializeToString())


def _rename(file: descriptor_pb2.FileDescriptorProto) -> None:
    before, after = f".{file.package}.", ".grpc.reflection.v1."
    file.name, file.package = _FILE, "grpc.reflection.v1"
    for message in file.message_type:
        for field in (each for each in message.field if each.type_name):
            field.type_name = field.type_name.replace(before, after)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(before, after)
            method.output_type = method.output_type.replace(before, after)
