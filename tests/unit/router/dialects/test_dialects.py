"""One suite over all dialects of the table: answers, refusals and failures, each in the form that its clients read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from router.auth.api_keys import draw_key
from router.dialects.table import DIALECTS
from tests.unit.router.conftest import Frontend, open_frontend
from twostroke.base.errors import Overloaded, PeerLost
from twostroke.config import EndpointsConfig

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a client of a dialect asks, and how it reads an error and an end."""

    body: Json
    last_event: str
    """What the last event of a whole stream contains."""
    error_path: tuple[str, ...]
    """Keys that lead to the message of an error."""
    failure_event: str
    """What the last event of a stream that fails contains."""
    always_streams: bool = False
    never_streams: bool = False


MESSAGES = [{"role": "user", "content": "hi"}]
OPENAI_ERROR = ("error", "message")
WAYS: dict[str, Way] = {
    "/v1/chat/completions": Way(
        body={"messages": MESSAGES, "max_tokens": 5},
        last_event="[DONE]",
        error_path=OPENAI_ERROR,
        failure_event='"error"',
    ),
    "/v1/completions": Way(
        body={"prompt": "hi", "max_tokens": 5}, last_event="[DONE]", error_path=OPENAI_ERROR, failure_event='"error"'
    ),
    "/v1/messages": Way(
        body={"messages": MESSAGES, "max_tokens": 5},
        last_event="message_stop",
        error_path=OPENAI_ERROR,
        failure_event="event: error",
    ),
    "/v1/responses": Way(
        body={"input": "hi", "max_output_tokens": 5},
        last_event='"type":"response.incomplete"',
        error_path=OPENAI_ERROR,
        failure_event='"type":"response.failed"',
    ),
    **{
        f"/v2/models/{{model:path}}{version}/generate{stream}": Way(
            body={"text_input": "hi", "parameters": {"max_tokens": 5}, "return_finish_reason": True},
            last_event='"finish_reason":"length"',
            error_path=("error",),
            failure_event='"error"',
            always_streams=bool(stream),
            never_streams=not stream,
        )
        for version in ("", "/versions/{version}")
        for stream in ("", "_stream")
    },
}
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}
WAYS |= {
    f"/v2/models/{{model:path}}{version}/infer": Way(
        body={"inputs": [TENSOR], "parameters": {"max_tokens": 5}},
        last_event="",
        error_path=("error",),
        failure_event="",
        never_streams=True,
    )
    for version in ("", "/versions/{version}")
}
STREAMED = [path for path, way in WAYS.items() if not way.never_streams]


def url_of(path: str, model: str = "toy") -> str:
    return path.replace("{model:path}", model).replace("{version}", "1")


def asked(path: str, *, stream: bool = False, **fields: Any) -> Json:
    way = WAYS[path]
    streams = {} if way.always_streams or way.never_streams else {"stream": stream}
    named = {} if "{model" in path else {"model": "toy"}
    return {**named, **way.body, **streams, **fields}


def message_of(path: str, body: bytes) -> str:
    found: Any = json.loads(body)
    for key in WAYS[path].error_path:
        found = found[key]
    assert isinstance(found, str)
    return found


@pytest.fixture
async def client(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as opened:
        yield opened


def test_every_dialect_is_in_this_suite() -> None:
    assert {dialect.path for dialect in DIALECTS} == set(WAYS)


@pytest.mark.parametrize("path", [path for path, way in WAYS.items() if not way.always_streams])
async def test_a_whole_answer_has_the_text(client: httpx.AsyncClient, path: str) -> None:
    got = await client.post(url_of(path), json=asked(path))
    assert got.status_code == 200, got.text
    assert '"hello"' in got.text


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_ends_as_its_clients_expect(client: httpx.AsyncClient, path: str) -> None:
    got = await client.post(url_of(path), json=asked(path, stream=True))
    assert got.status_code == 200
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.text.endswith("\n\n")
    assert WAYS[path].last_event in got.text.rstrip("\n").split("\n\n")[-1]


@pytest.mark.parametrize("path", WAYS)
async def test_a_body_that_is_no_json_is_refused_in_the_dialects_form(client: httpx.AsyncClient, path: str) -> None:
    got = await client.post(url_of(path), content=b"{", headers={"content-type": "application/json"})
    assert got.status_code == 400
    assert "JSON" in message_of(path, got.content)


def with_field(path: str, name: str, value: Any) -> Json:
    """A body with one more field, where the dialect has those that are not its own."""
    body = asked(path)
    if "{model" in path:
        return body | {"parameters": {**body["parameters"], name: value}}
    return body | {name: value}


@pytest.mark.parametrize("path", WAYS)
async def test_a_client_of_every_dialect_may_narrow_speculation(frontend: Frontend, path: str) -> None:
    async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as client:
        got = await client.post(url_of(path), json=with_field(path, "speculation", "off"))
        assert got.status_code == 200, got.text
        assert [request.speculation for request in frontend.dispatcher.requests] == ["off"]
        got = await client.post(url_of(path), json=with_field(path, "speculation", "fast"))
        assert got.status_code == 400
        assert "speculation" in message_of(path, got.content)


@pytest.mark.parametrize("path", WAYS)
async def test_an_unknown_model_is_refused_in_the_dialects_form(client: httpx.AsyncClient, path: str) -> None:
    body = asked(path) if "{model" in path else asked(path, model="other")
    got = await client.post(url_of(path, "other"), json=body)
    assert got.status_code == 404
    assert "other" in message_of(path, got.content)


@pytest.mark.parametrize("path", WAYS)
async def test_another_method_is_refused_in_the_dialects_form(client: httpx.AsyncClient, path: str) -> None:
    got = await client.get(url_of(path))
    assert got.status_code in (404, 405)
    assert message_of(path, got.content)


@pytest.mark.parametrize("path", WAYS)
async def test_an_overloaded_server_says_when_to_retry(
    frontend: Frontend, client: httpx.AsyncClient, path: str
) -> None:
    frontend.dispatcher.failure = Overloaded("all is full", retry_after_s=3.2)
    got = await client.post(url_of(path), json=asked(path, stream=True))
    assert got.status_code in (429, 503, 529)
    assert got.headers["retry-after"] == "4"
    assert "all is full" in message_of(path, got.content)


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_that_fails_in_the_middle_says_so_last(
    frontend: Frontend, client: httpx.AsyncClient, path: str
) -> None:
    frontend.dispatcher.failure, frontend.dispatcher.failure_after = PeerLost("the worker is gone"), 2
    got = await client.post(url_of(path), json=asked(path, stream=True))
    assert got.status_code == 200
    last = got.text.rstrip("\n").split("\n\n")[-1]
    assert WAYS[path].failure_event in last
    assert "the worker is gone" in last
    assert WAYS[path].last_event not in got.text


@pytest.mark.parametrize("path", WAYS)
async def test_a_call_without_a_key_is_refused_in_the_dialects_form(path: str, tmp_path: Any) -> None:
    keys = tmp_path / "keys.yaml"
    key = draw_key()
    keys.write_text(yaml.safe_dump({"keys": {key.id: {"sha256": key.sha256, "tenant": "a"}}}))
    async with (
        open_frontend(EndpointsConfig(api_keys=str(keys))) as opened,
        httpx.AsyncClient(base_url=opened.url, timeout=60) as client,
    ):
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            got = await client.post(url_of(path), json=asked(path), headers=headers)
            assert got.status_code == 401
            assert message_of(path, got.content)
        for headers in ({"x-api-key": key.key}, {"authorization": f"Bearer {key.key}"}):
            assert (await client.post(url_of(path), json=asked(path), headers=headers)).status_code == 200


@pytest.mark.parametrize("path", STREAMED)
async def test_a_client_that_goes_away_frees_everything(
    frontend: Frontend, client: httpx.AsyncClient, path: str
) -> None:
    frontend.dispatcher.failure_after, frontend.dispatcher.stalls = 2, True
    async with client.stream("POST", url_of(path), json=asked(path, stream=True)) as got:
        assert got.status_code == 200
        await frontend.dispatcher.stalled.wait()
    await frontend.dispatcher.all_closed.wait()
