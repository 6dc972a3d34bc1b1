"""Logs repeat no word that clients chose, whatever is refused or breaks, in every dialect (docs/security.md)."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from router.auth.api_keys import draw_key
from tests.unit.router.conftest import Frontend, open_frontend
from tests.unit.router.dialects.test_dialects import WAYS, asked, url_of, with_field
from twostroke.base.errors import InternalError, InvalidRequest, Overloaded
from twostroke.config import EndpointsConfig
from twostroke.observability.bug_log import log_bug, place_of
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

CANARY = "canary-4711"
OURS = ("router", "twostroke", "grpc", "root", "asyncio")
"""Loggers of a router's process; those of this test's clients are not among them."""
FIELDS = [
    "user",
    "metadata",
    "response_format",
    "tools",
    "tool_choice",
    "stop",
    "stop_sequences",
    "logit_bias",
    "cache_salt",
    "prompt_cache_key",
    "priority",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "system",
    "instructions",
    "prompt",
    "input",
    "messages",
    "text",
    "parameters",
    "text_input",
    "inputs",
    "outputs",
    "id",
    "temperature",
    "seed",
    "n",
    "logprobs",
    "service_tier",
    "reasoning_effort",
    "thinking",
    "stream_options",
    "suffix",
    "echo",
    "structured_outputs",
    "guided_regex",
    "guided_grammar",
    "guided_json",
    "guided_choice",
    "truncation",
    "previous_response_id",
    "store",
    "speculation",
    "mm_processor_kwargs",
]
SCHEMA = {"type": "object", "properties": {CANARY: {"type": CANARY, "$ref": f"#/{CANARY}"}}, "required": [CANARY]}
VALUES: dict[str, Any] = {
    "text": CANARY,
    "object": {CANARY: CANARY},
    "list": [CANARY],
    "typed": {"type": CANARY, CANARY: 1},
    "messages": [{"role": CANARY, "content": [{"type": CANARY, "text": CANARY}]}],
    "tools": [{"type": "function", "name": CANARY, "function": {"name": f"{CANARY} !", "parameters": SCHEMA}}],
    "schema": {"type": "json_schema", "json_schema": {"name": CANARY, "schema": SCHEMA}, "format": {"schema": SCHEMA}},
    "grammar": {"regex": f"({CANARY}", "grammar": f"start: {CANARY}", "json": SCHEMA, "choice": CANARY},
}
FITTING = [
    ("response_format", "schema"),
    ("text", "schema"),
    ("structured_outputs", "grammar"),
    ("tools", "tools"),
    ("messages", "messages"),
    ("input", "messages"),
    ("chat_template_kwargs", "object"),
]
"""Fields with values that are read deeply before they are refused."""
PATHS = [path for path in WAYS if "versions" not in path and "_stream" not in path]


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """All that this process's own loggers have written, as handlers format it."""
    format_of = logging.Formatter("%(name)s %(message)s").format
    return "\n".join(format_of(each) for each in caplog.records if each.name.partition(".")[0] in OURS)


@pytest.fixture(autouse=True)
def every_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def bodies(path: str) -> Iterator[dict[str, Any]]:
    yield asked(path, **{CANARY: CANARY})
    if "{model" not in path:
        yield asked(path, model=CANARY)
    for name, kind in FITTING:
        yield with_field(path, name, VALUES[kind])
    kinds = itertools.cycle(VALUES.values())
    for value, _ in zip(kinds, range(PATHS.index(path)), strict=False):  # each path begins with another kind
        yield with_field(path, "user", value)
    for name, value in zip(FIELDS, kinds, strict=False):
        yield asked(path) | {name: value}


@pytest.mark.parametrize("path", PATHS)
async def test_no_refusal_over_http_puts_a_clients_word_into_a_log(
    frontend: Frontend, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    refused = 0
    async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as client:
        for body in bodies(path):
            refused += (await client.post(url_of(path), json=body)).status_code >= 400
        await client.post(url_of(path), content=b'{"canary-4711": ', headers={"content-type": "application/json"})
        await client.post(url_of(path, CANARY), json=asked(path))
        await client.post(f"/v1/{CANARY}?{CANARY}={CANARY}", json=asked(path))
        for name in ("x-tenant-id", "authorization", "traceparent", "last-event-id", "x-priority", "user-agent"):
            refused += (
                await client.post(url_of(path), json=asked(path), headers={name: CANARY * 40})
            ).status_code >= 400
    assert refused > 10
    assert "request failed" in logged(caplog), "refusals are logged at all"
    places = set(re.findall(r"at=(\S+)", logged(caplog)))
    assert len(places) > 3, f"each refusal has the place of its check: {places}"
    assert CANARY not in logged(caplog)


REQUESTS: list[Callable[[], inference_pb2.GenerateRequest]] = [
    lambda: inference_pb2.GenerateRequest(text="a", tenant=CANARY * 40),
    lambda: inference_pb2.GenerateRequest(text="a", model=CANARY),
    lambda: inference_pb2.GenerateRequest(text="a", cache_salt=CANARY * 200),
    lambda: inference_pb2.GenerateRequest(text=CANARY * 10_000),
]


async def test_no_refusal_over_grpc_puts_a_clients_word_into_a_log(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    stub, refused = inference_pb2_grpc.InferenceStub(frontend.channel), 0
    for make in REQUESTS:
        request = make()
        try:
            async for _ in stub.Generate(request, metadata=[("x-canary", CANARY)]):
                pass
        except grpc.aio.AioRpcError:
            refused += 1
    assert refused >= 2
    assert CANARY not in logged(caplog)


@pytest.mark.parametrize(
    "failure",
    [InvalidRequest(f"{CANARY} is wrong", field=CANARY), Overloaded(CANARY), InternalError(CANARY), KeyError(CANARY)],
    ids=lambda failure: type(failure).__name__,
)
async def test_what_fails_later_or_by_a_bug_is_logged_without_its_text(
    frontend: Frontend, failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.dispatcher.failure = failure
    for path in ("/v1/completions", "/v1/messages"):
        await frontend.http.post(path, json=asked(path))
    assert "request=" in logged(caplog)
    assert CANARY not in logged(caplog)


async def test_no_refused_api_key_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: {}\n")
    shown = [draw_key().key, f"ts-{CANARY}"]
    async with open_frontend(EndpointsConfig(api_keys=str(keys))) as frontend:
        stub = inference_pb2_grpc.InferenceStub(frontend.channel)
        for key in shown:
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
                for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    assert (await frontend.http.post(path, json=asked(path), headers=headers)).status_code == 401
            call = stub.Generate(inference_pb2.GenerateRequest(text="a"), metadata=[("authorization", f"Bearer {key}")])
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    for key in shown:
        assert key not in logged(caplog)
        assert key.rpartition("-")[2][-20:] not in logged(caplog)


def breaks() -> None:
    try:
        {}[CANARY]
    except KeyError as error:
        raise ValueError(CANARY) from error


def test_a_bug_is_logged_with_its_places_and_kinds_alone(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("twostroke.test")
    with pytest.raises(ValueError, match=CANARY) as raised:
        breaks()
    log_bug(log, "it broke request=%s", "r-1", error=raised.value)
    assert place_of(raised.value).startswith("requests/test_logs.py:")
    assert "it broke request=r-1" in logged(caplog)
    assert "ValueError requests/test_logs.py:" in logged(caplog)
    assert "KeyError requests/test_logs.py:" in logged(caplog)
    assert CANARY not in logged(caplog)
    assert place_of(ValueError()) == "elsewhere"
