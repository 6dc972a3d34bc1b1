"""/v1/responses over HTTP, as OpenAI's client and Codex ask, and what it refuses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.named_events import named_events_of
from tests.unit.router.conftest import Frontend, ScriptedDispatcher
from twostroke.base.errors import PeerLost
from twostroke.request import FinishReason

PATH = "/v1/responses"


async def test_openais_client_gets_the_response_and_its_usage(frontend: Frontend) -> None:
    frontend.dispatcher.reason = FinishReason.STOP
    response = await frontend.openai.responses.create(model="toy", input="hi", instructions="Be brief.")
    assert (response.status, response.output_text) == ("completed", "hello")
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == 5


async def test_openais_client_follows_the_stream_to_the_same_response(frontend: Frontend) -> None:
    frontend.dispatcher.reason = FinishReason.STOP
    async with frontend.openai.responses.stream(model="toy", input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert deltas == list("hello")
    assert final.output_text == "hello"


async def test_the_tokens_of_an_input_are_counted_as_the_response_counts_them(frontend: Frontend) -> None:
    asked: dict[str, Any] = {"model": "toy", "input": "hi", "instructions": "Be brief.", "reasoning": {"effort": "low"}}
    counted = await frontend.openai.responses.input_tokens.count(**asked)
    assert (counted.object, frontend.dispatcher.requests) == ("response.input_tokens", [])
    response = await frontend.openai.responses.create(**asked)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens > 10


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "hi", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "hi", "model": "other"}, "model"),
    ],
)
async def test_what_cannot_be_counted_is_refused_by_name(
    app: tuple[ScriptedDispatcher, httpx.AsyncClient], body: dict[str, Any], param: str
) -> None:
    refused = await app[1].post(f"{PATH}/input_tokens", json=body)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == param


async def test_a_probe_for_one_token_gets_one(frontend: Frontend) -> None:
    response = await frontend.openai.responses.create(model="toy", input="hi", max_output_tokens=1)
    assert (response.status, response.output_text) == ("incomplete", "h")


async def test_a_limit_beyond_the_context_window_is_what_fits(frontend: Frontend) -> None:
    await frontend.openai.responses.create(model="toy", input="hi", max_output_tokens=64_000)
    (request,) = frontend.dispatcher.requests
    assert len(request.prompt) + request.sampling.max_tokens == 256


async def test_a_format_is_a_grammar_of_the_answer(app: tuple[ScriptedDispatcher, httpx.AsyncClient]) -> None:
    dispatcher, http = app
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}
    got = await http.post(PATH, json={"input": "hi", "text": {"format": form}})
    assert got.json()["text"]["format"] == form
    (request,) = dispatcher.requests
    assert request.sampling.grammar is not None
    refused = await http.post(PATH, json={"input": "hi", "text": {"format": form | {"schema": {"not": {}}}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format.schema")


async def test_a_failure_in_the_middle_ends_with_a_failed_response(frontend: Frontend) -> None:
    frontend.dispatcher.failure, frontend.dispatcher.failure_after = PeerLost("gone"), 2
    got = await frontend.http.post(PATH, json={"input": "hi", "stream": True})
    name, data = named_events_of(got.text)[-1]
    assert name == "response.failed"
    assert data["response"]["error"]["message"] == "gone"


async def test_a_failure_before_the_first_token_is_an_error_of_openais_form(frontend: Frontend) -> None:
    frontend.dispatcher.failure = PeerLost("gone")
    got = await frontend.http.post(PATH, json={"input": "hi", "stream": True})
    assert got.status_code == 503
    assert got.json()["error"]["message"] == "gone"


async def test_what_the_client_asked_for_is_repeated(app: tuple[ScriptedDispatcher, httpx.AsyncClient]) -> None:
    _, http = app
    asked = {"metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 4, "instructions": "x"}
    asked |= {"parallel_tool_calls": False, "safety_identifier": "s", "prompt_cache_key": "k", "user": "u"}
    body = (await http.post(PATH, json={"input": "hi", "store": True, **asked})).json()
    assert {name: body[name] for name in asked} == asked
    assert body["store"] is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", {"id": "conv_1"}),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("background", True),
        ("n", 2),
        ("messages", []),
        ("max_tokens", 5),
        ("response_format", {"type": "text"}),
        ("max_output_tokens", 0),
        ("max_output_tokens", "5"),
        ("top_logprobs", 21),
        ("temperature", -1),
        ("top_p", 0),
        ("metadata", []),
        ("include", "x"),
        ("store", "yes"),
        ("instructions", 5),
        ("tool_choice", "always"),
        ("guided_json", {}),
        ("text", "x"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    app: tuple[ScriptedDispatcher, httpx.AsyncClient], field: str, value: Any
) -> None:
    dispatcher, http = app
    got = await http.post(PATH, json={"input": "hi", field: value})
    assert (got.status_code, got.json()["error"]["param"]) == (400, field)
    assert not dispatcher.requests


@pytest.mark.parametrize(
    "harmless",
    [
        {"previous_response_id": None, "conversation": None, "background": False, "n": 1},
        {"truncation": "auto", "service_tier": "flex", "stream_options": {"include_obfuscation": False}},
        {"reasoning": {"effort": "none", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"include": ["file_search_call.results"], "max_tool_calls": 3, "context_management": [], "unknown": 1},
        {"prompt_cache_retention": "24h", "client_metadata": {}, "tools": [{"type": "web_search"}]},
    ],
)
async def test_what_changes_nothing_is_accepted(
    app: tuple[ScriptedDispatcher, httpx.AsyncClient], harmless: dict[str, Any]
) -> None:
    _, http = app
    assert (await http.post(PATH, json={"input": "hi", **harmless})).status_code == 200


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_no_response_is_kept(app: tuple[ScriptedDispatcher, httpx.AsyncClient], method: str) -> None:
    _, http = app
    got = await http.request(method, f"{PATH}/resp_1/cancel")
    assert got.status_code == 404
    assert "this server stores none" in got.json()["error"]["message"]
