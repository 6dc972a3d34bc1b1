"""`/openapi.json` describes the endpoints that are served: routes, fields that are read, who needs a key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from router.auth.key_authenticator import KeyAuthenticator
from router.endpoints.app import build_http_app
from router.endpoints.openapi import BODIES, MADE
from router.kserve.pages import KServePages
from router.metrics import RouterMetrics
from router.requests.request_handler import RequestHandler
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import ScriptedDispatcher
from tests.unit.router.dialects.openai.test_api_page import READ, rows_of

Json = dict[str, Any]

ASKS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def described() -> Json:
    return asyncio.run(_described())


async def _described() -> Json:
    handler = RequestHandler(ScriptedDispatcher(), InlinePreparer(ByteText()), RouterMetrics(), model="toy")
    app = build_http_app(handler, max_body_bytes=1 << 16, pages=KServePages(handler).pages())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        first, second = await asyncio.gather(http.get("/openapi.json"), http.get("/openapi.json"))
    assert (first.status_code, first.headers["content-type"]) == (200, "application/json")
    assert first.content == second.content
    body: Json = first.json()
    return body


def schema_of(described: Json, path: str) -> Json:
    return described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


async def test_every_route_is_described(described: Json, app: tuple[ScriptedDispatcher, httpx.AsyncClient]) -> None:
    index = (await app[1].get("/")).text.split("\n\n")[1]
    for line in index.splitlines():
        *methods, path = line.split()
        operations = described["paths"][path.replace(":path}", "}")]
        assert set(operations) == {method.lower() for method in methods} - {"head"}
    assert described["openapi"].startswith("3.1")


async def test_the_description_is_one_of_openapi(described: Json) -> None:
    names = [each["operationId"] for operations in described["paths"].values() for each in operations.values()]
    assert len(names) == len(set(names)) > 30
    for path, operations in described["paths"].items():
        for operation in operations.values():
            parameters = {each["name"] for each in operation.get("parameters", ()) if each["required"]}
            assert parameters == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert all("description" in answer for answer in operation["responses"].values())
            contents = [operation.get("requestBody", {}), *operation["responses"].values()]
            for media in (each for content in contents for each in content.get("content", {}).values()):
                Draft202012Validator.check_schema(media.get("schema", {}))


@pytest.mark.parametrize("path", READ)
async def test_the_fields_are_those_of_the_manual(described: Json, path: str) -> None:
    shown = set(schema_of(described, path)["properties"])
    assert shown - {name for row in rows_of(path) for name in row.names} - {"split_special_tokens"} == set()
    read = {field.alias or name for kind in READ[path] for name, field in kind.model_fields.items()}
    assert read - MADE - shown == set()


async def test_lists_of_tokens_and_the_names_of_each_dialect_are_described(described: Json) -> None:
    tokens = {"anyOf": [{"items": {"type": "integer"}, "type": "array"}, {"type": "null"}]}
    for path in READ:
        assert schema_of(described, path)["properties"]["allowed_token_ids"] == tokens
    assert {"stop", "user"}.isdisjoint(schema_of(described, "/v1/messages")["properties"])


@pytest.mark.parametrize("path", ASKS)
async def test_what_is_described_is_answered_and_what_is_not_is_refused(
    described: Json, app: tuple[ScriptedDispatcher, httpx.AsyncClient], path: str
) -> None:
    validator = Draft202012Validator(schema_of(described, path))
    assert validator.is_valid(ASKS[path])
    got = await app[1].post(path, json=ASKS[path])
    assert got.status_code == 200, got.text
    error = described["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    for name in BODIES[path].required:
        broken = {key: value for key, value in ASKS[path].items() if key != name}
        assert not validator.is_valid(broken)
        refused = await app[1].post(path, json=broken)
        assert refused.status_code == 400
        Draft202012Validator(error).validate(refused.json())


async def test_the_description_needs_no_key_and_says_what_does(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("keys: {}")
    metrics = RouterMetrics()
    handler = RequestHandler(ScriptedDispatcher(), InlinePreparer(ByteText()), metrics, model="toy")
    app = build_http_app(handler, KeyAuthenticator(str(tmp_path / "keys"), "", metrics), max_body_bytes=1 << 16)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
        got = await http.get("/openapi.json")
        paths = got.json()["paths"]
        for path, needs in (("/v1/models", True), ("/version", True), ("/live", False), ("/openapi.json", False)):
            assert bool(paths[path]["get"]["security"]) == needs
            assert ((await http.get(path)).status_code == 401) == needs
