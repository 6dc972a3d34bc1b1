"""The calls that load and unload adapters: gRPC on the admin port, and vLLM's over HTTP."""

# ruff: noqa: N802  # methods have the names that the .proto gives them

from __future__ import annotations

import hmac
from typing import Any

import grpc.aio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.adapters.admin import AdapterAdmin
from router.endpoints.app import read_body
from router.endpoints.openapi import OperatorCall
from router.json_body import parse_json
from router.server_branch import RouterBranch, RouterParts
from twostroke.base.errors import InvalidApiKey, InvalidRequest
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

MOST_BODY_BYTES = 64 << 10

LOAD_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace"})
UNLOAD_FIELDS = frozenset({"lora_name", "lora_int_id"})
"""vLLM accepts the number of an adapter, too, and does not need it. It is ignored here."""


class LoraEndpoints:
    """vLLM's calls over HTTP."""

    def __init__(self, adapters: AdapterAdmin, token: str) -> None:
        """`token` is the cluster's. Callers must have it as their bearer token. A client's API key is not enough."""
        self._adapters = adapters
        self._token = token

    def calls(self) -> tuple[OperatorCall, ...]:
        return tuple(
            OperatorCall(path, call, "lora_name") for path, call in ((LOAD_PATH, self.load), (UNLOAD_PATH, self.unload))
        )

    async def load(self, request: Request) -> Response:
        body = await self._body(request, LOAD_FIELDS)
        name, path, replaces = body.get("lora_name"), body.get("lora_path"), body.get("load_inplace", False)
        if not name or not path or not isinstance(name, str) or not isinstance(path, str):
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.", field="lora_name")
        if not isinstance(replaces, bool):
            raise InvalidRequest("load_inplace must be true or false", field="load_inplace")
        await self._adapters.load(name, path, replaces=replaces)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = (await self._body(request, UNLOAD_FIELDS)).get("lora_name")
        if not name or not isinstance(name, str):
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", field="lora_name")
        await self._adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _body(self, request: Request, fields: frozenset[str]) -> dict[str, Any]:
        self._check_caller(request)
        parsed = parse_json(await read_body(request, MOST_BODY_BYTES))
        unknown = next((key for key in parsed if key not in fields), None)
        if unknown is not None:
            raise InvalidRequest(f"{unknown[:60]!r} is not known here", field=unknown[:60])
        return parsed

    def _check_caller(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not self._token or not hmac.compare_digest(given, self._token.encode()):
            raise InvalidApiKey("loading adapters takes the cluster's token, as a bearer token", reason="wrong")


class AdapterAdminService(adapters_pb2_grpc.AdapterAdminServicer):
    def __init__(self, admin: AdapterAdmin) -> None:
        self._admin = admin

    async def Load(
        self, request: adapters_pb2.LoadAdapterRequest, context: Context
    ) -> adapters_pb2.LoadAdapterResponse:
        adapter = await self._admin.load(request.name, request.path, replaces=request.replace)
        return adapters_pb2.LoadAdapterResponse(adapter=adapter.to_message())

    async def Unload(
        self, request: adapters_pb2.UnloadAdapterRequest, context: Context
    ) -> adapters_pb2.UnloadAdapterResponse:
        await self._admin.unload(request.name)
        return adapters_pb2.UnloadAdapterResponse()

    async def List(
        self, request: adapters_pb2.ListAdaptersRequest, context: Context
    ) -> adapters_pb2.ListAdaptersResponse:
        adapters = [adapter.to_message() for _, adapter in sorted(self._admin.adapters.items())]
        return adapters_pb2.ListAdaptersResponse(adapters=adapters)


class RouterAdapters(RouterBranch):
    def __init__(self, parts: RouterParts) -> None:
        config, fleet = parts.config, parts.handler.dispatcher
        self._admin = AdapterAdmin(config.adapters, config.served_model_name, config.model_dir, fleet, parts.supervisor)
        if config.adapters.allow_runtime_lora_updating:
            self.operators = LoraEndpoints(self._admin, config.cluster_token).calls()

    def administer(self, rpc: RpcServer) -> None:
        adapters_pb2_grpc.add_AdapterAdminServicer_to_server(AdapterAdminService(self._admin), rpc.server)
        rpc.offer("twostroke.v1.AdapterAdmin", waits_for_ready=False, is_described=True)

    async def open(self) -> None:
        await self._admin.load_first()
