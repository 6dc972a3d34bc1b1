"""Custom and allowed tools in chats, streamed and whole, and sentences for those who write another API's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from router.dialects.openai.chat_messages import message_of
from router.dialects.openai.chat_tools import read_chat_tools
from router.dialects.responses.tools import read_tools
from tests.unit.router.dialects.openai.test_tool_calls import ADD, BODY, WEATHER, choices_of, client, stream, whole
from twostroke.base.errors import InvalidRequest

Json = dict[str, Any]

PATCH: Json = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}


def with_regex(regex: str) -> Json:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": regex}}
    return {"type": "custom", "custom": {"name": "dial", "format": grammar}}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


DIGITS = with_regex("[0-9]{3}")
TOOLS = [WEATHER, PATCH]
SAID = (
    'I do.\n<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n\\"x\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
INPUT = '*** Begin\n"x"'


def allowed(*names: str, mode: str = "auto") -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


async def test_a_custom_call_has_its_input_as_text() -> None:
    async with client(SAID) as (_, http):
        choice = await whole(http, tools=TOOLS)
    patch, weather = choice["message"]["tool_calls"]
    assert patch == {"id": patch["id"], "type": "custom", "custom": {"name": "patch", "input": INPUT}}
    assert (weather["type"], weather["function"]["name"]) == ("function", "weather")
    assert choice["finish_reason"] == "tool_calls"


async def test_a_streamed_custom_call_is_the_whole_one() -> None:
    async with client(SAID) as (_, http):
        choices = choices_of(await stream(http, tools=TOOLS))
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    first, *others = [piece for piece in pieces if piece["index"] == 0]
    assert (first["type"], first["custom"]["name"], bool(first["id"])) == ("custom", "patch", True)
    assert all(set(piece) == {"index", "custom"} and piece["custom"]["input"] for piece in others)
    assert len(others) > 3
    assert "".join(piece["custom"]["input"] for piece in (first, *others)) == INPUT
    assert {piece["index"] for piece in pieces if "function" in piece} == {1}
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("arguments", ['{"x": 1, "input": "late"}', '{"other": 5}'])
async def test_an_input_that_is_known_at_the_end_alone_is_streamed_too(arguments: str) -> None:
    said = f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
    async with client(said) as (_, http):
        (call,) = (await whole(http, tools=TOOLS))["message"]["tool_calls"]
        choices = choices_of(await stream(http, tools=TOOLS))
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    assert "".join(piece["custom"].get("input", "") for piece in pieces) == call["custom"]["input"] != ""
    assert all(choice["delta"] for choice in choices[:-1])


async def test_a_stream_that_is_resumed_goes_on_with_the_input() -> None:
    async with client(SAID) as (_, http):
        events = await stream(http, {"x-resumable-stream": "true"}, tools=TOOLS)
    for cut in range(3, len(events) - 1, 5):
        token = next(line.removeprefix("id: ") for line in events[cut - 1] if line.startswith("id: "))
        async with client(SAID) as (_, another):
            rest = await stream(another, {"last-event-id": token}, tools=TOOLS)
        deltas = [choice["delta"] for choice in choices_of(events[:cut]) + choices_of(rest)]
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ()) if piece["index"] == 0]
        assert "".join(piece["custom"]["input"] for piece in pieces) == INPUT
        assert [piece["type"] for piece in pieces if "type" in piece] == ["custom"]


async def test_openais_client_reads_custom_calls_streamed_and_whole() -> None:
    async with client(SAID) as (_, http):
        sdk = openai.AsyncOpenAI(api_key="x", base_url="http://toy/v1", http_client=http)
        asked: Json = {"model": "toy", "messages": BODY["messages"], "tools": TOOLS}
        got = await sdk.chat.completions.create(**asked)
        (patch, _) = got.choices[0].message.tool_calls or ()
        assert patch.type == "custom"
        assert (patch.custom.name, patch.custom.input) == ("patch", INPUT)
        text = ""
        async for chunk in await sdk.chat.completions.create(**asked, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                text += (piece.to_dict().get("custom") or {"input": ""})["input"]  # type: ignore[index]  # no type yet
        assert text == INPUT


async def test_a_choice_of_a_custom_tool_is_kept_to_its_regex() -> None:
    said = '<tool_call>\n{"name": "dial", "arguments": {"input": "112"}}\n</tool_call>'
    async with client(said) as (dispatcher, http):
        choice = await whole(http, tools=[DIGITS], tool_choice={"type": "custom", "custom": {"name": "dial"}})
        await whole(http, tools=[DIGITS])
    assert choice["message"]["tool_calls"][0]["custom"] == {"name": "dial", "input": "112"}
    for request in dispatcher.requests:
        grammar = request.sampling.grammar
        assert grammar is not None
        assert "[0-9]{3}" in str(grammar)


async def test_custom_calls_of_a_history_are_shown_as_calls_of_their_function() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    message = message_of({"role": "assistant", "tool_calls": [call]}, "messages[0]")
    function = {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    history = [*BODY["messages"], {"role": "assistant", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "c", "content": "Done"}]
    async with client(SAID) as (_, http):
        await whole(http, tools=TOOLS, messages=history)
    for broken in ({"name": "patch"}, {"input": "x"}, "x", None):
        with pytest.raises(InvalidRequest, match="custom must be an object"):
            message_of({"role": "assistant", "tool_calls": [{**call, "custom": broken}]}, "messages[0]")


async def test_tools_that_are_not_allowed_are_not_shown_and_not_called() -> None:
    async with client(SAID) as (dispatcher, http):
        choice = await whole(http, tools=TOOLS, tool_choice=allowed("weather"))
        required = await whole(http, tools=TOOLS, tool_choice=allowed("weather", mode="required"))
    for each in (choice, required):
        assert [call["function"]["name"] for call in each["message"]["tool_calls"]] == ["weather"]
    auto, must = dispatcher.requests
    assert auto.sampling.grammar is None
    assert must.sampling.grammar is not None


async def test_allowed_tools_may_be_custom() -> None:
    reference = {"type": "custom", "custom": {"name": "patch"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [reference]}}
    given = read_chat_tools([WEATHER, ADD, PATCH], choice)
    assert [tool["function"]["name"] for tool in given.functions] == ["patch"]
    assert (given.choice, given.custom_names) == ("required", {"patch"})


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", '"function": {"name": ...}'),
        ({"tool_choice": {"type": "custom", "name": "add"}}, "tool_choice", '"custom": {"name": ...}'),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", "allowed_tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice", '"function": {"name": ...}'),
        ({"tool_choice": {"type": "custom", "custom": {"name": "no"}}}, "tool_choice", "must name one of the tools"),
        ({"tool_choice": {"type": "custom", "custom": 5}}, "tool_choice", "tool_choice must be"),
        ({"tool_choice": allowed("no")}, "tool_choice", "must name one of the tools"),
        ({"tool_choice": allowed()}, "tool_choice", "allowed_tools with tools"),
        ({"tool_choice": allowed("add", mode="none")}, "tool_choice", "allowed_tools with tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools[0]", '"function": {"name": ...}'),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0]", '"custom": {"name": ...}'),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools[0]", "/v1/messages"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom", "with a name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "description": 5}}]}, "tools[0].custom", "a string"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar",
            "lark or regex",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "x"}}}]}, "tools[0].custom", "type"),
        ({"tools": [with_regex("(")]}, "tools[0].custom.format.grammar.definition", "not a regex"),
        ({"tools": [with_regex("(?=a)b")]}, "tools[0].custom.format.grammar.definition", "not supported"),
        ({"tools": [with_regex("a" * 20_001)]}, "tools[0].custom.format.grammar.definition", "at most 20000"),
        ({"tools": [PATCH, named("patch")]}, "tools", "of a function and of a custom tool"),
    ],
)
async def test_other_forms_in_a_chat_get_a_sentence_that_helps(fields: Json, param: str, said: str) -> None:
    async with client("x") as (_, http):
        for more in ({}, {"stream": True}):
            got = await http.post("/v1/chat/completions", json=BODY | fields | more)
            check_refusal(got, param, said)


SHELL: Json = {"type": "function", "name": "shell"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "shell"}}}, "tool_choice", '"name": ...}'),
        ({"tool_choice": {"type": "custom", "custom": {"name": "shell"}}}, "tool_choice", '"name": ...}'),
        ({"tool_choice": allowed("shell")}, "tool_choice", '"mode": ..., "tools": [...]'),
        ({"tool_choice": {"type": "any"}}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "tool", "name": "shell"}}, "tool_choice", '"name": ...}'),
        ({"tool_choice": "any"}, "tool_choice", "none, auto, required"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}},
            "tool_choice",
            "tools[0] must name one of the tools",
        ),
        ({"tools": [PATCH]}, "tools[0]", '{"type": "custom", "name": ...}'),
        ({"tools": [SHELL, {"type": "custom", "name": "shell"}]}, "tools", "of a function and of a custom tool"),
    ],
)
async def test_a_chats_form_in_responses_gets_a_sentence_that_helps(fields: Json, param: str, said: str) -> None:
    async with client("x") as (_, http):
        check_refusal(await http.post("/v1/responses", json={"input": "hi", "tools": [SHELL]} | fields), param, said)


def check_refusal(got: httpx.Response, param: str, said: str) -> None:
    error = got.json()["error"]
    assert got.status_code == 400
    assert error["param"].startswith(param)
    assert said in error["message"], error["message"]


def test_a_response_repeats_the_tools_that_are_not_allowed_too() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [SHELL, {"type": "web_search_preview"}]}
    tools = read_tools([SHELL, {"type": "function", "name": "look"}], choice)
    assert [tool["name"] for tool in tools.given] == ["shell", "look"]
    assert [tool["name"] for tool in tools.shown] == ["shell"]
    assert json.loads(json.dumps(tools.choice))["tools"] == [{"type": "function", "name": "shell"}]
