"""Tool calls and reasoning in answers of /v1/messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.endpoints.app import build_http_app
from router.metrics import RouterMetrics
from router.requests.request_handler import RequestHandler
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import FACTS, ScriptedDispatcher
from tests.unit.router.dialects.anthropic.claude_code import CLAUDE_CODE, HEADERS
from tests.unit.router.dialects.anthropic.test_content_blocks import events_of, put_together
from twostroke.config.output import OutputConfig
from twostroke.request import FinishReason, SampledToken

MESSAGES = "/v1/messages"
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {
    "max_tokens": 9000,
    "messages": [{"role": "user", "content": "x"}],
    "tools": [WEATHER, ADD],
}
BASH = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
TWO_CALLS = (
    "<think>\nWeather first.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
)


@asynccontextmanager
async def client(text: str, **output: str) -> AsyncIterator[tuple[ScriptedDispatcher, httpx.AsyncClient]]:
    """Opens a router whose workers say `text`, and which takes answers apart as `output` says."""
    said = [SampledToken(byte) for byte in text.encode()]
    facts = dataclasses.replace(FACTS, max_model_len=4096, pool_tokens=4096)
    dispatcher = ScriptedDispatcher(facts, script=lambda request, index: said, reason=FinishReason.STOP)
    config = OutputConfig(**({"tool_call_parser": "hermes", "reasoning_parser": "think"} | output))
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText(config)), RouterMetrics(), model="toy")
    transport = httpx.ASGITransport(build_http_app(handler, max_body_bytes=1 << 16))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        yield dispatcher, http


def without_ids(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name not in ("id", "signature")} for block in blocks]


async def test_thoughts_words_and_calls_are_blocks() -> None:
    async with client(TWO_CALLS) as (_, http):
        answer = (await http.post(MESSAGES, json=BODY)).json()
        events = events_of((await http.post(MESSAGES, json=BODY | {"stream": True})).text)
    thought, said, weather, add = without_ids(answer["content"])
    assert (thought["type"], thought["thinking"].strip()) == ("thinking", "Weather first.")
    assert (said["type"], said["text"].strip()) == ("text", "Let me see.")
    assert weather == {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    assert add == {"type": "tool_use", "name": "add", "input": {"a": 1, "b": [2]}}
    assert answer["stop_reason"] == "tool_use"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    streamed = put_together(events)
    assert without_ids(streamed) == without_ids(answer["content"])
    assert all(block["signature"] for block in streamed if block["type"] == "thinking")
    ids = [block["id"] for block in streamed if block["type"] == "tool_use"]
    assert len(set(ids)) == 2


async def test_the_text_of_a_call_is_no_words_in_a_stream() -> None:
    async with client(TWO_CALLS) as (_, http):
        events = events_of((await http.post(MESSAGES, json=BODY | {"stream": True})).text)
    texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
    assert "tool_call" not in "".join(texts)
    assert "think" not in "".join(texts)


async def test_with_the_choice_none_an_answer_has_no_calls() -> None:
    async with client(TWO_CALLS, reasoning_parser="none") as (_, http):
        answer = (await http.post(MESSAGES, json=BODY | {"tool_choice": {"type": "none"}})).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["content"][0]["text"] == TWO_CALLS
    assert answer["stop_reason"] == "end_turn"


async def test_a_call_that_is_cut_ends_at_the_limit() -> None:
    async with client(TWO_CALLS) as (dispatcher, http):
        dispatcher.reason = FinishReason.LENGTH
        answer = (await http.post(MESSAGES, json=BODY | {"max_tokens": 110})).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] == 110


@pytest.mark.parametrize("said", ["Hello.", BASH])
async def test_what_claude_code_sends_is_answered_with_words_and_calls(said: str) -> None:
    async with client(said) as (dispatcher, http):
        answer = await http.post(f"{MESSAGES}?beta=true", json=CLAUDE_CODE, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    (request,) = dispatcher.requests
    assert request.sampling.max_tokens == 4096 - len(request.prompt)
    assert b"billing" not in bytes(request.prompt)
    assert len(request.hints) == 3
    events = events_of(answer.text)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    (block,) = put_together(events)
    if said == "Hello.":
        assert block == {"type": "text", "text": said}
    else:
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "Bash", {"command": "ls"})
    assert events[-2]["delta"]["stop_reason"] == ("end_turn" if said == "Hello." else "tool_use")


async def test_a_choice_that_names_no_tool_is_refused() -> None:
    async with client("x") as (_, http):
        refused = await http.post(MESSAGES, json=BODY | {"tool_choice": {"type": "tool", "name": "none"}})
    assert refused.status_code == 400
    assert "tool_choice" in json.loads(refused.text)["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "auto"}, '{"type": "auto"}'),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, '{"type": "tool", "name": ...}'),
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "input_schema"),
        ({"tools": [{"type": "function", "name": "add", "parameters": {}}]}, "input_schema"),
    ],
)
async def test_forms_of_openais_api_get_a_sentence_that_helps(fields: dict[str, Any], said: str) -> None:
    async with client("x") as (_, http):
        refused = await http.post(MESSAGES, json=BODY | fields)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert said in message
    assert "OpenAI" in message
