"""Tool calls and reasoning in messages of the gRPC API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from tests.unit.router.conftest import Frontend, open_frontend
from tests.unit.router.dialects.openai.test_chat_tools import PATCH
from tests.unit.router.dialects.openai.test_tool_calls import ADD, BODY, THOUGHT, TWO_CALLS, WEATHER
from twostroke.config import EndpointsConfig
from twostroke.config.output import OutputConfig
from twostroke.request import FinishReason, SampledToken
from twostroke.rpc.v1 import inference_pb2
from twostroke.rpc.v1.inference_pb2_grpc import InferenceStub


@pytest.fixture
async def calling() -> AsyncIterator[Frontend]:
    """A router whose workers think, and then call two tools."""
    output = OutputConfig(tool_call_parser="hermes", reasoning_parser="think")
    async with open_frontend(EndpointsConfig(max_request_bytes=1 << 16), output=output) as frontend:
        said = [SampledToken(byte) for byte in (THOUGHT + TWO_CALLS).encode()]
        frontend.dispatcher.script = lambda request, index: said
        frontend.dispatcher.reason = FinishReason.STOP
        yield frontend


def ask(**fields) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role="user", content="x")
    chat = inference_pb2.Chat(messages=[message], tools=json.dumps([WEATHER, ADD]), **fields)
    return inference_pb2.GenerateRequest(request_id="mine", chat=chat)


async def answered(frontend, request) -> list[inference_pb2.GenerateResponse]:
    return [message async for message in InferenceStub(frontend.channel).Generate(request)]


def joined(messages) -> dict:
    calls: list[dict] = []
    for piece in (piece for message in messages for piece in message.tool_calls):
        if piece.index == len(calls):
            assert piece.id
            calls.append({"name": piece.name, "arguments": ""})
        else:
            assert (piece.id, piece.name) == ("", "")
        calls[piece.index]["arguments"] += piece.arguments
    text, reasoning = ("".join(getattr(message, name) for message in messages) for name in ("text", "reasoning"))
    return {"text": text, "reasoning": reasoning, "calls": calls, "finish_reason": messages[-1].finish_reason}


async def test_text_reasoning_and_calls_are_those_of_the_openai_api(calling):
    got = joined(await answered(calling, ask()))
    (choice,) = (await calling.http.post("/v1/chat/completions", json=BODY)).json()["choices"]
    message = choice["message"]
    assert got == {
        "text": message["content"],
        "reasoning": message["reasoning_content"],
        "calls": [call["function"] for call in message["tool_calls"]],
        "finish_reason": choice["finish_reason"],
    }
    assert got["finish_reason"] == "tool_calls"


async def test_a_custom_tools_call_is_that_of_its_function(calling):
    said = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n"}}\n</tool_call>'
    calling.dispatcher.script = lambda request, index: [SampledToken(byte) for byte in said.encode()]
    names = [{"type": "custom", "custom": {"name": "patch"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": names}}
    request = ask(tool_choice=json.dumps(choice))
    request.chat.tools = json.dumps([WEATHER, PATCH])
    assert joined(await answered(calling, request))["calls"] == [{"name": "patch", "arguments": '{"input": "a\\n"}'}]


async def test_a_stream_that_is_resumed_anywhere_has_the_same_calls(calling):
    messages = await answered(calling, ask())
    whole = joined(messages)
    for cut in (5, len(THOUGHT) + 3, len(THOUGHT) + 60, len(messages) - 2):
        request = ask()
        request.resume_from = messages[cut].resume_token
        rest = await answered(calling, request)
        assert joined([*messages[: cut + 1], *rest]) == whole


async def test_calls_are_text_where_no_tool_may_be_called(calling):
    got = joined(await answered(calling, ask(tool_choice="none")))
    assert (got["text"], got["calls"], got["finish_reason"]) == (TWO_CALLS, [], "stop")


async def test_a_tool_that_is_not_there_cannot_be_chosen(calling):
    choice = {"type": "function", "function": {"name": "nothing"}}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answered(calling, ask(tool_choice=json.dumps(choice)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tool_choice" in refused.value.details()


async def test_a_call_that_must_be_made_is_a_grammar_as_in_the_openai_api(calling):
    await answered(calling, ask(tool_choice="required"))
    await calling.http.post("/v1/chat/completions", json={**BODY, "tool_choice": "required"})
    await answered(calling, ask(tool_choice="auto"))
    grammars = [request.sampling.grammar for request in calling.dispatcher.requests]
    assert grammars[0] is not None
    assert grammars[0] == grammars[1] != grammars[2]
