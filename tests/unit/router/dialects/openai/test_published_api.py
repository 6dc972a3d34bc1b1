"""What the server writes is what OpenAI's published description says; so are the requests that tests send."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.output.output_formats import TOOLS_BY_NAME
from router.text.output.parts import ReasoningPart
from tests.conformance.record_outputs import recorded_lines
from tests.conformance.record_outputs import tools as callable_tools
from tests.hand_cut import messages_of
from tests.named_events import named_events_of
from tests.published_api import PublishedApi, published_api, published_description
from tests.unit.router.conftest import Frontend
from tests.unit.router.dialects.openai.test_chat_tools import PATCH, TOOLS, allowed
from tests.unit.router.dialects.openai.test_chat_tools import SAID as CUSTOM_SAID
from tests.unit.router.dialects.openai.test_tool_calls import BODY, THOUGHT, TWO_CALLS, client, joined
from tests.unit.router.dialects.responses.codex import REQUEST, SAID
from tests.unit.router.dialects.responses.test_codex import codex
from tests.unit.router.dialects.responses.test_replies import PARTS, events_of, reply_to, streamed
from twostroke.base.errors import InternalError, PeerLost
from twostroke.request import FinishReason, SampledToken

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
FORMAT = {"text": {"format": SCHEMA, "verbosity": "low"}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CALLABLE = callable_tools()


@pytest.fixture(scope="module")
def api() -> PublishedApi:
    path = published_description()
    if path is None:
        pytest.skip("OpenAI's description (shared/specs/openai-openapi.yaml) lies nowhere above the checkout")
    return published_api(path)


def with_logprobs(frontend: Frontend) -> None:
    top = ((104, -0.5), (105, float("-inf")))
    frontend.dispatcher.script = lambda request, index: [SampledToken(byte, -0.5, top) for byte in b"hi!"]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(
    "options", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True, "user": "u"}]
)
async def test_chats(frontend: Frontend, api: PublishedApi, reason: FinishReason, options: dict[str, Any]) -> None:
    with_logprobs(frontend)
    frontend.dispatcher.reason = reason
    body = ASK | options
    api.check("CreateChatCompletionRequest", body)
    api.check("CreateChatCompletionResponse", (await frontend.http.post(CHAT, json=body)).json())
    usages: tuple[dict[str, Any], ...] = ({}, {"include_usage": True})
    for usage in (*usages, {"include_usage": True, "continuous_usage_stats": True}):
        got = await frontend.http.post(CHAT, json=body | {"stream": True, "stream_options": usage})
        chunks = messages_of(got.content)
        assert len(chunks) > 3
        for chunk in chunks:
            api.check("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"logprobs": 2}, {"prompt": ["a", "b"]}, {"echo": True}])
async def test_completions(frontend: Frontend, api: PublishedApi, options: dict[str, Any]) -> None:
    with_logprobs(frontend)
    body = {"model": "toy", "prompt": "hi"} | options
    api.check("CreateCompletionRequest", body)
    api.check("CreateCompletionResponse", (await frontend.http.post(TEXT, json=body)).json())
    usage = {"stream_options": {"include_usage": True}}
    for chunk in messages_of((await frontend.http.post(TEXT, json=body | {"stream": True} | usage)).content):
        for choice in chunk["choices"]:
            if choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"  # the description knows no chunk before the last
        if chunk["usage"] is None:
            del chunk["usage"]
        api.check("CreateCompletionResponse", chunk)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("options", [{}, LOGPROBS, FORMAT, {"metadata": {"a": "b"}, "instructions": "x", "user": "u"}])
async def test_responses(frontend: Frontend, api: PublishedApi, reason: FinishReason, options: dict[str, Any]) -> None:
    with_logprobs(frontend)
    frontend.dispatcher.reason = reason
    body = {"model": "toy", "input": "hi"} | options
    api.check("CreateResponse", body)
    api.check("Response", (await frontend.http.post(RESPONSES, json=body)).json())
    events = named_events_of((await frontend.http.post(RESPONSES, json=body | {"stream": True})).text)
    assert len(events) > 8
    for _, event in events:
        api.check_event(event)


async def test_counts_of_inputs(frontend: Frontend, api: PublishedApi) -> None:
    body = {"model": "toy", "input": "hi", "instructions": "Be brief."}
    api.check("TokenCountsBody", body)
    api.check("TokenCountsResource", (await frontend.http.post(f"{RESPONSES}/input_tokens", json=body)).json())


async def test_responses_to_codex_and_those_that_failed(api: PublishedApi) -> None:
    async with codex() as (dispatcher, http):
        for failed_after in (None, *range(1, len(SAID), 7)):
            dispatcher.failure = None if failed_after is None else PeerLost("gone")
            dispatcher.failure_after = failed_after or 0
            for _, event in named_events_of((await http.post(RESPONSES, json=REQUEST)).text):
                api.check_event(event)
        dispatcher.failure = None
        api.check("Response", (await http.post(RESPONSES, json=REQUEST | {"stream": False})).json())


async def test_chats_with_reasoning_and_calls(api: PublishedApi) -> None:
    body = ASK | {"tools": BODY["tools"]}
    api.check("CreateChatCompletionRequest", body)
    async with client(THOUGHT + TWO_CALLS) as (_, http):
        api.check("CreateChatCompletionResponse", (await http.post(CHAT, json=body)).json())
        usage = {"stream_options": {"include_usage": True}}
        chunks = messages_of((await http.post(CHAT, json=body | {"stream": True} | usage)).content)
        assert any(choice["delta"].get("tool_calls") for chunk in chunks for choice in chunk["choices"])
        for chunk in chunks:
            api.check("CreateChatCompletionStreamResponse", chunk)


async def test_chats_with_custom_and_allowed_tools(api: PublishedApi) -> None:
    for fields in ({"tools": TOOLS}, {"tools": [PATCH]}, {"tools": TOOLS, "tool_choice": allowed("weather")}):
        api.check("CreateChatCompletionRequest", ASK | fields)
        async with client(CUSTOM_SAID) as (_, http):
            api.check("CreateChatCompletionResponse", (await http.post(CHAT, json=ASK | fields)).json())
            for chunk in messages_of((await http.post(CHAT, json=ASK | fields | {"stream": True})).content):
                for choice in chunk["choices"]:  # the description knows no custom calls in streams
                    calls = choice["delta"].get("tool_calls", [])
                    choice["delta"]["tool_calls"] = [call for call in calls if "custom" not in call]
                api.check("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("form", sorted(TOOLS_BY_NAME.keys() & {line["format"] for line in recorded_lines()}))
async def test_streams_of_what_real_models_said(api: PublishedApi, form: str) -> None:
    """The shortest answers that call a tool, and the shortest that only looks like it."""
    lines = sorted((line for line in recorded_lines() if line["format"] == form), key=lambda line: len(line["output"]))
    calling = [line for line in lines if any(part[0] == "call" for part in line["parts"])]
    reasoning = "harmony" if form == "harmony" else "none"
    for line in (*calling[:3], next(line for line in lines if line not in calling)):
        async with client(line["output"], tool_call_parser=form, reasoning_parser=reasoning) as (_, http):
            got = await http.post(CHAT, json=ASK | {"tools": CALLABLE, "stream": True})
            chunks = messages_of(got.content)
            for chunk in chunks:
                api.check("CreateChatCompletionStreamResponse", chunk)
            message = joined([choice for chunk in chunks for choice in chunk["choices"]])
            assert message["content"] == "".join(part[1] for part in line["parts"] if part[0] == "text")
            functions = [call["function"] for call in message["tool_calls"]]
            assert [["call", each["name"], each["arguments"]] for each in functions] == [
                part for part in line["parts"] if part[0] == "call"
            ]
            functions = [{"type": "function", "strict": False, **tool["function"]} for tool in CALLABLE]
            events = await http.post(RESPONSES, json={"input": "hi", "tools": functions, "stream": True})
            for _, event in named_events_of(events.text):
                api.check_event(event)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
def test_responses_with_reasoning_and_calls(api: PublishedApi, finish: FinishReason, include: list[str]) -> None:
    for _, event in streamed(reply_to(include=include), events_of(PARTS, finish)):
        api.check_event(event)
    for parts in range(len(PARTS)):
        reply = reply_to(include=include)
        begun = "".join(map(reply.messages, events_of(PARTS)[: parts + 1]))
        for _, event in named_events_of(begun + reply.failure(InternalError("broken"))):
            api.check_event(event)


async def test_errors_and_models(frontend: Frontend, api: PublishedApi) -> None:
    for path in (CHAT, TEXT, RESPONSES, "/v1/nothing"):
        api.check("ErrorResponse", (await frontend.http.post(path, json={})).json())
    api.check("ListModelsResponse", (await frontend.http.get("/v1/models")).json())
    api.check("Model", (await frontend.http.get("/v1/models/toy")).json())


def test_the_check_fails_where_a_body_is_another(api: PublishedApi) -> None:
    events = events_of([(ReasoningPart("so"),)])
    for _, event in streamed(reply_to(), events):
        del event["sequence_number"]
        with pytest.raises(AssertionError, match="sequence_number"):
            api.check_event(event)
    whole = streamed(reply_to(), events)[-1][1]["response"]
    for name in ("id", "output", "tools"):
        with pytest.raises(AssertionError, match=name):
            api.check("Response", {key: value for key, value in whole.items() if key != name})
    whole["output"][0]["summary"] = None
    with pytest.raises(AssertionError):
        api.check("Response", whole)
