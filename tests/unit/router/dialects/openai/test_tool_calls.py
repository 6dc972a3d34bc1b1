"""Tool calls and reasoning in messages and deltas of chat completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.dialects.openai.chat_messages import tools_of
from router.endpoints.app import build_http_app
from router.metrics import RouterMetrics
from router.requests.request_handler import RequestHandler
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import ScriptedDispatcher
from twostroke.config.output import OutputConfig
from twostroke.request import FinishReason, SampledToken

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, ADD]}
THOUGHT = "<think>\nWeather first.\n</think>\n\n"
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
)


@asynccontextmanager
async def client(text: str, **output: str) -> AsyncIterator[tuple[ScriptedDispatcher, httpx.AsyncClient]]:
    """Opens a router whose workers say `text`, and which takes answers apart as `output` says."""
    said = [SampledToken(byte) for byte in text.encode()]
    dispatcher = ScriptedDispatcher(script=lambda request, index: said, reason=FinishReason.STOP)
    config = OutputConfig(**({"tool_call_parser": "hermes", "reasoning_parser": "think"} | output))
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText(config)), RouterMetrics(), model="toy")
    transport = httpx.ASGITransport(build_http_app(handler, max_body_bytes=1 << 16))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        yield dispatcher, http


async def whole(http: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    answer = await http.post(CHAT, json=BODY | options)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


async def stream(http: httpx.AsyncClient, headers: dict[str, str] | None = None, **options: Any) -> list[list[str]]:
    """Returns the server-sent events of a stream, each as its lines."""
    answer = await http.post(CHAT, json=BODY | {"stream": True} | options, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return [event.split("\n") for event in answer.text.split("\n\n") if event]


def choices_of(events: list[list[str]]) -> list[dict[str, Any]]:
    chunks = [json.loads(line[6:]) for event in events for line in event if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins deltas as OpenAI's clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(message["tool_calls"]):
                assert set(piece) == {"index", "id", "type", "function"}
                call = {"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])}
                message["tool_calls"].append(call)
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


async def test_a_whole_answer_has_text_reasoning_and_calls_in_fields_of_their_own() -> None:
    async with client(THOUGHT + TWO_CALLS) as (_, http):
        choice = await whole(http)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == message["reasoning"] == "Weather first."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Paris"}'},
        {"name": "add", "arguments": '{"a": 1, "b": [2]}'},
    ]
    first, second = (call["id"] for call in message["tool_calls"])
    assert first.startswith("call_")
    assert first != second


async def test_content_is_null_where_an_answer_has_nothing_but_calls() -> None:
    async with client(TWO_CALLS.removeprefix("Let me see.\n")) as (_, http):
        assert (await whole(http))["message"]["content"] is None


async def test_deltas_joined_are_the_whole_message() -> None:
    async with client(THOUGHT + TWO_CALLS) as (_, http):
        message = (await whole(http))["message"]
        choices = choices_of(await stream(http))
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    said = joined(choices)
    assert (said["content"], said["reasoning_content"]) == (message["content"], message["reasoning_content"])
    assert [call["function"] for call in said["tool_calls"]] == [call["function"] for call in message["tool_calls"]]


async def test_arguments_are_streamed_while_the_call_goes_on() -> None:
    async with client(TWO_CALLS) as (_, http):
        choices = choices_of(await stream(http))
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    assert len([piece for piece in pieces if piece["index"] == 0]) > len("Paris")


async def test_without_tools_or_with_tool_choice_none_calls_are_text() -> None:
    for options in ({"tools": None}, {"tool_choice": "none"}):
        async with client(TWO_CALLS) as (_, http):
            choice = await whole(http, **options)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == TWO_CALLS
        assert "tool_calls" not in choice["message"]


async def test_a_model_without_parsers_answers_as_it_always_did() -> None:
    async with client(THOUGHT, tool_call_parser="none", reasoning_parser="none") as (_, http):
        assert (await whole(http, tools=None))["message"] == {"role": "assistant", "content": THOUGHT, "refusal": None}
        refused = await http.post(CHAT, json=BODY)
    assert refused.status_code == 400
    assert "--tool-call-parser" in refused.json()["error"]["message"]


async def test_stop_strings_are_found_in_content_alone() -> None:
    async with client(f"{THOUGHT}Stop at Paris or at Rome") as (dispatcher, http):
        choice = await whole(http, stop=["Paris", "Weather"])
        assert choice["message"]["content"] == "Stop at "
        assert choice["finish_reason"] == "stop"
        assert len(dispatcher.early) == 1
    async with client(TWO_CALLS) as (dispatcher, http):
        choice = await whole(http, stop=["Paris", "</tool_call>", "}}", "see.<"])
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "add"]
        assert not dispatcher.early


async def test_a_call_that_is_cut_off_is_told_as_length() -> None:
    async with client(TWO_CALLS) as (dispatcher, http):
        dispatcher.reason = FinishReason.LENGTH
        choice = await whole(http, max_tokens=TWO_CALLS.index("Paris") + 3)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'


async def test_a_stream_is_resumed_at_another_router_with_the_same_calls() -> None:
    async with client(THOUGHT + TWO_CALLS) as (_, http):
        events = await stream(http, {"x-resumable-stream": "true"})
    complete = joined(choices_of(events))
    for cut, event in enumerate(events[:-1], 1):
        token = next(line.removeprefix("id: ") for line in event if line.startswith("id: "))
        async with client(THOUGHT + TWO_CALLS) as (_, another):
            rest = await stream(another, {"last-event-id": token})
        choices = choices_of(events[:cut]) + choices_of(rest)
        assert joined(choices) == complete
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


async def test_tokens_and_logprobs_come_with_every_chunk_even_while_a_parser_waits() -> None:
    async with client(TWO_CALLS) as (_, http):
        choices = choices_of(await stream(http, logprobs=True, return_token_ids=True))
    assert bytes(token for choice in choices for token in choice.get("token_ids", ())).decode() == TWO_CALLS
    assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices) == len(TWO_CALLS)


@pytest.mark.parametrize("n", [1, 3])
async def test_choices_are_taken_apart_on_their_own(n: int) -> None:
    async with client(TWO_CALLS) as (_, http):
        answer = await http.post(CHAT, json=BODY | {"n": n})
    ids = [call["id"] for choice in answer.json()["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2 * n


async def test_a_prompt_that_begins_the_reasoning_needs_no_mark_in_the_answer() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>"}]
    options = {"messages": messages, "continue_final_message": True, "tools": None}
    async with client("Hm.\n</think>\n\nYes.") as (_, http):
        message = (await whole(http, **options))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_workers_get_a_grammar_where_calls_are_required_and_none_where_they_are_free() -> None:
    async with client(TWO_CALLS) as (dispatcher, http):
        for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
            await whole(http, tool_choice=choice)
        await whole(http, parallel_tool_calls=False)
        grammars = [request.sampling.grammar for request in dispatcher.requests]
    assert grammars[0] is None
    assert len({grammar.source for grammar in grammars[1:] if grammar is not None}) == 3
    assert "weather" not in grammars[2].source


@pytest.mark.parametrize("kind", [{}, {"type": None}])
async def test_a_tool_without_a_type_is_a_function(kind: dict[str, Any]) -> None:
    tools = [{**kind, "function": tool["function"]} for tool in (WEATHER, ADD)]
    async with client(TWO_CALLS, tool_call_parser="hermes") as (_, http):
        chat = await http.post(CHAT, json={**BODY, "tools": tools})
        assert [call["function"]["name"] for call in chat.json()["choices"][0]["message"]["tool_calls"]] == [
            "weather",
            "add",
        ]
        flat = [tool["function"] for tool in tools]
        response = await http.post("/v1/responses", json={"input": "x", "tools": flat})
        assert [item["name"] for item in response.json()["output"] if item["type"] == "function_call"] == [
            "weather",
            "add",
        ]
    assert tools_of(tools) == tools_of([WEATHER, ADD])
    assert list(tools_of(tools)[0]) == ["type", "function"]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_arguments_are_an_object_unless_the_answer_was_cut(reason: FinishReason) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    async with client(said, tool_call_parser="hermes") as (dispatcher, http):
        dispatcher.reason = reason
        (choice,) = (await http.post(CHAT, json=BODY)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    is_cut = reason is FinishReason.LENGTH
    assert choice["finish_reason"] == ("length" if is_cut else "tool_calls")
    assert call["function"]["arguments"] == '{"city": "Par' + '"}' * (not is_cut)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_markdown_block_of_a_call_is_one_in_every_dialect(is_streamed: bool) -> None:
    """Small models write no mark unless a grammar makes them."""
    said = '```json\n{"name": "weather", "arguments": {"city": "Paris"}}\n```'
    async with client(said, tool_call_parser="hermes") as (_, http):
        for path, body in (
            (CHAT, BODY),
            ("/v1/responses", {"input": "x", "tools": [{"type": "function", **WEATHER["function"]}]}),
            (
                "/v1/messages",
                {
                    "messages": BODY["messages"],
                    "max_tokens": 200,
                    "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
                },
            ),
        ):
            answer = await http.post(path, json={**body, "model": "", "stream": is_streamed})
            assert answer.status_code == 200, answer.text
            assert "weather" in answer.text
            assert "```" not in answer.text
            assert any(word in answer.text for word in ('"tool_calls"', '"function_call"', '"tool_use"'))
