"""Qwen2.5-Coder calls tools: two rounds, several calls in an answer, required and named, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.cluster.requests.dialects import DIALECTS, Dialect, Dialogue
from tests.cluster.requests.dialects import ask as ask_in
from tests.cluster.served import ANY_PORT, starting
from tests.published_api import PublishedApi, published_api, published_description

MODEL = "qwen2.5-coder-1.5b:gguf"


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": {**schema, "additionalProperties": False}}
    return {"type": "function", "function": function}


TOOLS: Any = [
    _tool("get_weather", "Get the current weather of one city", "city"),
    _tool("calculate", "Evaluate an arithmetic expression", "expression"),
]

SYSTEM = (
    "You call tools. To call one, answer with a block that begins with < tool_call > and ends with < /tool_call > "
    "(written without the spaces). A question about two cities or two things needs two blocks, one after the other. "
    "Never use Markdown. Once the results of the calls are there, answer with one sentence in plain words, without any "
    "block."
)
"""Shows the marks with spaces: Qwen2.5-Coder never learned the tokens that `<tool_call>` and `</tool_call>` become."""

TWO_CALLS = (
    (
        "What is the weather in Paris, and what is 37 times 29?",
        [("get_weather", "Paris"), ("calculate", "37 * 29")],
        ('{"temperature_c": 21}', "1073"),
        ("21", "1073"),
    ),
    (
        "What is the weather in Paris and in Rome?",
        [("get_weather", "Paris"), ("get_weather", "Rome")],
        ('{"city": "Paris", "temperature_c": 21}', '{"city": "Rome", "temperature_c": 27}'),
        ("21", "27"),
    ),
)
"""Questions, their calls, what the calls return, and what the last answer has to say."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    directory: Path = tmp_path_factory.mktemp("tools")
    flags = ["--model", MODEL, "--prefill", "0", "--decode", "1", "--max-model-len", "1024", *ANY_PORT]
    with starting(directory, *flags) as server:
        for stage in ("starting workers", "loading the model", "Ctrl-C ends it"):  # each has its own patience
            server.until_printed(stage)
        address = server.address("HTTP")
        yield OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.fixture(scope="module")
def api() -> PublishedApi | None:
    """OpenAI's description, where it lies beside the checkout."""
    path = published_description()
    return None if path is None else published_api(path)


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


def check_calls(calls: list[tuple[str, Any]], expected: list[tuple[str, str]]) -> None:
    """Arguments are one string each, whose spaces are the model's."""
    assert [(name, "".join(str(value) for value in arguments.values())) for name, arguments in calls] == expected


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_left_to_itself_the_model_makes_two_calls_in_an_answer_and_then_says_their_results(
    client: OpenAI, dialect: Dialect, api: PublishedApi | None
) -> None:
    """Nothing forces a call: `tool_choice` is `auto` in both rounds."""
    url = str(client.base_url).removesuffix("/v1/")
    for question, expected, results, said in TWO_CALLS:
        dialogue = Dialogue(SYSTEM, question, TOOLS)
        called = ask_in(url, dialect, dialogue, api, model=MODEL)
        check_calls(called.says[1], expected)
        assert called.text == ""
        by_id = {call.call_id: result for call, result in zip(called.calls, results, strict=True)}
        answered = ask_in(url, dialect, replace(dialogue, answer=called, results=by_id), api, model=MODEL)
        assert answered.calls == []
        assert all(number in answered.text for number in said), answered.text


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_where_calls_are_required_an_answer_may_have_two(
    client: OpenAI, dialect: Dialect, api: PublishedApi | None
) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    choice: Any = {"type": "any"} if dialect.name == "messages" else "required"
    for question, expected, _, _ in TWO_CALLS:
        answer = ask_in(url, dialect, Dialogue("", question, TOOLS), api, model=MODEL, tool_choice=choice)
        check_calls(answer.says[1], expected)
        assert answer.text == ""
