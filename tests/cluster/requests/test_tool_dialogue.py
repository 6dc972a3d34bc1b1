"""Qwen2.5-Coder calls tools for an unmodified OpenAI client: two rounds, required and named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.cluster.served import ANY_PORT, starting

MODEL = "qwen2.5-coder-1.5b:gguf"


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": {**schema, "additionalProperties": False}}
    return {"type": "function", "function": function}


TOOLS: Any = [
    _tool("get_weather", "Get the current weather of one city", "city"),
    _tool("calculate", "Evaluate an arithmetic expression", "expression"),
]


def _call(call_id: str, city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"id": call_id, "type": "function", "function": function}


TURN_WITH_TWO_CALLS: list[Any] = [
    {"role": "user", "content": "What is the weather in Oslo and in Bern?"},
    {"role": "assistant", "content": None, "tool_calls": [_call("call_1", "Oslo"), _call("call_2", "Bern")]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature_c": 4}'},
    {"role": "tool", "tool_call_id": "call_2", "content": '{"temperature_c": 9}'},
    {"role": "assistant", "content": "It is 4 degrees in Oslo and 9 degrees in Bern."},
]
"""Shows a small model that an answer may have two calls."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    directory: Path = tmp_path_factory.mktemp("tools")
    flags = ["--model", MODEL, "--prefill", "0", "--decode", "1", "--max-model-len", "1024", *ANY_PORT]
    with starting(directory, *flags) as server:
        for stage in ("starting workers", "loading the model", "Ctrl-C ends it"):  # each has its own patience
            server.until_printed(stage)
        address = server.address("HTTP")
        yield OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=300, max_retries=0)


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    asked = {"tools": TOOLS} | options
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=100, **asked)
    return answer.choices[0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


@pytest.mark.slow
def test_a_dialogue_of_two_rounds_about_weather_and_numbers(client: OpenAI) -> None:
    for question, name, result, said in (
        ("What is the weather in Paris?", "get_weather", '{"temperature_c": 21, "sky": "sunny"}', "21"),
        ("What is 37 times 29?", "calculate", "1073", ""),
    ):
        messages: list[Any] = [{"role": "user", "content": question}]
        called = ask(client, messages, tool_choice="required", parallel_tool_calls=False)
        assert called.finish_reason == "tool_calls"
        assert called.message.content is None
        assert [call[0] for call in calls_of(called)] == [name]
        (call,) = called.message.tool_calls
        messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answered = ask(client, messages, tools=[])
        assert answered.finish_reason == "stop"
        assert said in answered.message.content


@pytest.mark.slow
def test_a_named_tool_is_called_once(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "calculate"}}
    choice = ask(client, [{"role": "user", "content": "How warm is it in Rome?"}], tool_choice=named)
    assert [name for name, _ in calls_of(choice)] == ["calculate"]


@pytest.mark.slow
def test_deltas_of_an_answer_that_may_have_several_calls_are_those_of_the_whole_answer(client: OpenAI) -> None:
    messages = [*TURN_WITH_TWO_CALLS, {"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    whole = ask(client, messages, tool_choice="required")
    assert whole.finish_reason == "tool_calls"
    assert calls_of(whole)[0] == ("get_weather", {"city": "Paris"})
    joined: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=100, tool_choice="required", stream=True
    ):
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = joined.setdefault(piece.index, ["", ""])
            assert piece.function is not None
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments or ""
    assert [(name, json.loads(arguments)) for name, arguments in joined.values()] == calls_of(whole)
