"""vLLM's calls that load and unload adapters at run time, for who has the cluster's token."""

from __future__ import annotations

import hmac
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.endpoints.openapi import OperatorCall
from router.json_body import parse_json
from twostroke.base.errors import InvalidApiKey, InvalidRequest

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

MOST_BODY_BYTES = 64 << 10

LOAD_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace"})
UNLOAD_FIELDS = frozenset({"lora_name", "lora_int_id"})
"""vLLM takes its own number of an adapter too, and does not need it."""


class AdapterCalls(Protocol):
    async def load(self, name: str, path: str, *, replaces: bool) -> object: ...
    async def unload(self, name: str) -> None: ...


class LoraEndpoints:
    def __init__(self, adapters: AdapterCalls, token: str) -> None:
        """Whoever calls must have the token, as a bearer: what a client's key opens is not enough."""
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
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY_BYTES:
                raise InvalidRequest(f"the body has more than {MOST_BODY_BYTES} bytes")
        parsed = parse_json(bytes(body))
        unknown = next((key for key in parsed if key not in fields), None)
        if unknown is not None:
            raise InvalidRequest(f"{unknown[:60]!r} is not known here", field=unknown[:60])
        return parsed

    def _check_caller(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not self._token or not hmac.compare_digest(given, self._token.encode()):
            raise InvalidApiKey("loading adapters takes the cluster's token, as a bearer token", reason="wrong")
