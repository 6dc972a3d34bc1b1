"""A session of Codex CLI: what it sends, what it gets, and what it sends back in the next turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from tests.named_events import named_events_of
from tests.unit.router.conftest import FACTS, ScriptedDispatcher
from tests.unit.router.dialects.openai.test_tool_calls import client
from tests.unit.router.dialects.responses.codex import INPUT, REQUEST, SAID

PATH = "/v1/responses"


@asynccontextmanager
async def codex() -> AsyncIterator[tuple[ScriptedDispatcher, httpx.AsyncClient]]:
    """Opens a router with room for a session, whose workers say what Codex can do something with."""
    async with client(SAID) as (dispatcher, http):
        dispatcher.facts_now = replace(FACTS, max_model_len=8192, pool_tokens=8192)
        yield dispatcher, http


async def events(http: httpx.AsyncClient, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    got = await http.post(PATH, json=REQUEST | options)
    assert got.status_code == 200, got.text
    return named_events_of(got.text)


async def test_a_turn_has_reasoning_a_message_and_calls_of_both_kinds() -> None:
    async with codex() as (dispatcher, http):
        told = await events(http)
    assert told[-1][0] == "response.completed"
    output = told[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    reasoning, message, shell, patch = output
    assert reasoning["content"][0]["text"] == "Look first."
    assert message["content"][0]["text"] == "I look and mend."
    assert (shell["name"], shell["arguments"]) == ("shell", '{"command": ["ls"]}')
    assert (patch["name"], patch["input"]) == ("apply_patch", "*** Begin Patch\n")
    prompt = bytes(dispatcher.requests[0].prompt).decode()
    for said in ("You are Codex.", "Sandbox: off.", "Mend it.", "I look.", "a.py", "Done", "Ready."):
        assert said in prompt


async def test_a_stream_says_what_the_whole_response_says() -> None:
    async with codex() as (_, http):
        streamed = (await events(http))[-1][1]["response"]
        whole = (await http.post(PATH, json=REQUEST | {"stream": False})).json()
    for each in (streamed, whole):
        assert len(each["output"]) == 4
        for item in each["output"]:
            item.pop("call_id", None)
            del item["id"]
    assert streamed["output"] == whole["output"]
    assert streamed["usage"] == whole["usage"]
    assert streamed["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_the_next_turn_begins_with_what_the_last_one_said() -> None:
    """Codex keeps the reasoning's `encrypted_content` alone, and no ids."""
    async with codex() as (dispatcher, http):
        output = (await events(http))[-1][1]["response"]["output"]
        kept = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in output]
        del kept[0]["content"]
        outputs = [
            {"type": f"{item['type'].removesuffix('_call')}_call_output", "call_id": item["call_id"], "output": "ok"}
            for item in output[2:]
        ]
        assert (await events(http, input=[*INPUT, *kept, *outputs]))[-1][0] == "response.completed"
        first, second = (bytes(request.prompt).decode() for request in dispatcher.requests)
    assert second.startswith(first.rpartition("Ready.")[0])
    assert "I look and mend." in second.removeprefix(first)


async def test_no_tool_is_called_where_the_choice_is_none() -> None:
    async with codex() as (_, http):
        output = (await events(http, tool_choice="none"))[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert "<tool_call>" in output[1]["content"][0]["text"]


async def test_logprobs_are_those_of_the_message() -> None:
    async with codex() as (_, http):
        told = await events(http, include=["message.output_text.logprobs"])
    message = told[-1][1]["response"]["output"][1]
    written = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert written.endswith("I look and mend.")
