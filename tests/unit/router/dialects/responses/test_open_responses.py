"""What Open Responses' description asks of a response and of its events, written down from its published schema."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.output.parts import Part, TextPart
from tests.named_events import named_events_of
from tests.unit.router.conftest import Frontend
from tests.unit.router.dialects.responses.codex import SHELL
from tests.unit.router.dialects.responses.test_replies import PARTS, events_of, reply_to, streamed, whole
from twostroke.base.errors import InternalError
from twostroke.request import FinishReason

Json = dict[str, Any]
Types = tuple[type, ...]

NULL = type(None)
RESPONSE: dict[str, Types] = {
    "id": (str,),
    "object": (str,),
    "created_at": (int,),
    "completed_at": (int, NULL),
    "status": (str,),
    "incomplete_details": (dict, NULL),
    "model": (str,),
    "previous_response_id": (str, NULL),
    "instructions": (str, NULL),
    "output": (list,),
    "error": (dict, NULL),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": (str,),
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": (float,),
    "presence_penalty": (float,),
    "frequency_penalty": (float,),
    "top_logprobs": (int,),
    "temperature": (float,),
    "reasoning": (dict, NULL),
    "usage": (dict, NULL),
    "max_output_tokens": (int, NULL),
    "max_tool_calls": (int, NULL),
    "store": (bool,),
    "background": (bool,),
    "service_tier": (str,),
    "metadata": (dict,),
    "safety_identifier": (str, NULL),
    "prompt_cache_key": (str, NULL),
}
"""Required fields of a response."""

ITEMS: dict[str, dict[str, Types]] = {
    "message": {"id": (str,), "status": (str,), "role": (str,), "content": (list,)},
    "function_call": {"id": (str,), "call_id": (str,), "name": (str,), "arguments": (str,), "status": (str,)},
    "reasoning": {"id": (str,), "summary": (list,)},
    "custom_tool_call": {"id": (str,), "call_id": (str,), "name": (str,), "input": (str,)},
}
PARTS_OF_CONTENT: dict[str, dict[str, Types]] = {
    "output_text": {"text": (str,), "annotations": (list,), "logprobs": (list,)},
    "reasoning_text": {"text": (str,)},
}
_ITEM: dict[str, Types] = {"item_id": (str,), "output_index": (int,)}
_CONTENT: dict[str, Types] = {**_ITEM, "content_index": (int,)}
EVENTS: dict[str, dict[str, Types]] = {
    **{name: {"response": (dict,)} for name in ("created", "in_progress", "completed", "incomplete", "failed")},
    **{f"output_item.{name}": {"output_index": (int,), "item": (dict,)} for name in ("added", "done")},
    **{f"content_part.{name}": {**_CONTENT, "part": (dict,)} for name in ("added", "done")},
    "output_text.delta": {**_CONTENT, "delta": (str,), "logprobs": (list,)},
    "output_text.done": {**_CONTENT, "text": (str,), "logprobs": (list,)},
    "reasoning_text.delta": {**_CONTENT, "delta": (str,)},
    "reasoning_text.done": {**_CONTENT, "text": (str,)},
    "function_call_arguments.delta": {**_ITEM, "delta": (str,)},
    "function_call_arguments.done": {**_ITEM, "arguments": (str,)},
    "custom_tool_call_input.delta": {**_ITEM, "delta": (str,)},
    "custom_tool_call_input.done": {**_ITEM, "input": (str,)},
}


def check_fields(given: Json, fields: dict[str, Types]) -> None:
    for name, types in fields.items():
        assert name in given, f"{name} is missing"
        assert type(given[name]) in types, f"{name}: {given[name]!r}"


def check_item(item: Json) -> None:
    check_fields(item, ITEMS[item["type"]])
    for part in item.get("content") or ():
        check_fields(part, PARTS_OF_CONTENT[part["type"]])


def check_response(response: Json) -> None:
    check_fields(response, RESPONSE)
    for item in response["output"]:
        check_item(item)
    for tool in response["tools"]:
        if tool["type"] == "function":
            assert {"name", "description", "parameters", "strict"} <= tool.keys()
    assert set(response["reasoning"]) == {"effort", "summary"}
    assert response["text"].get("verbosity", "low") in ("low", "medium", "high")
    is_known = response["status"] in ("completed", "incomplete")
    assert (response["usage"] is not None) == is_known


def check_event(event: Json) -> None:
    kind = event["type"].removeprefix("response.")
    check_fields(event, {**EVENTS[kind], "sequence_number": (int,)})
    if "response" in event:
        check_response(event["response"])
    if "item" in event:
        check_item(event["item"])
    if "part" in event:
        check_fields(event["part"], PARTS_OF_CONTENT[event["part"]["type"]])


TEXT: list[tuple[Part, ...]] = [(TextPart("hi"),)]
OPTIONS: list[Json] = [
    {},
    {"tools": [{"type": "function", "name": "look"}]},
    {"tools": [SHELL], "tool_choice": {"type": "function", "name": "shell"}},
    {"text": {"verbosity": "high", "format": {"type": "json_object"}}, "metadata": {"a": "b"}},
    {"presence_penalty": 1, "frequency_penalty": -1, "temperature": 0, "top_p": 0.5, "instructions": "x"},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("parts", [[], TEXT, PARTS])
def test_a_response_and_its_events_have_all_that_is_required(
    parts: list[tuple[Part, ...]], finish: FinishReason, options: Json
) -> None:
    events = streamed(reply_to(**options), events_of(parts, finish))
    for _, event in events:
        check_event(event)
    check_response(whole(reply_to(**options), events_of(parts, finish)))


def test_a_failed_response_has_all_that_is_required() -> None:
    reply = reply_to()
    begun = "".join(map(reply.messages, events_of(PARTS)[:5]))
    for _, event in named_events_of(begun + reply.failure(InternalError("broken"))):
        check_event(event)


def test_a_response_says_which_penalties_were_used() -> None:
    body = whole(reply_to(presence_penalty=1, frequency_penalty=-0.5), events_of(TEXT))
    assert (body["presence_penalty"], body["frequency_penalty"]) == (1.0, -0.5)


@pytest.mark.parametrize("verbosity", [None, "low", "medium", "high"])
def test_the_verbosity_is_what_the_client_sent_or_absent(verbosity: str | None) -> None:
    body = whole(reply_to(text={"verbosity": verbosity}), events_of(TEXT))
    assert body["text"] == {"format": {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})}


def test_the_format_is_shown_without_what_the_client_made_up() -> None:
    sent = {"type": "json_schema", "schema": {"type": "integer"}, "strict": None, "x": 1}
    shown = whole(reply_to(text={"format": sent}), events_of(TEXT))["text"]["format"]
    assert shown == {"type": "json_schema", "name": "response", "schema": {"type": "integer"}, "strict": False}


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("text", {"verbosity": "loud"}, "text.verbosity"),
        ("text", {"format": {"type": "json_schema", "name": 5, "schema": {}}}, "text.format.name"),
        ("text", {"format": {"type": "json_schema", "description": 5, "schema": {}}}, "text.format.description"),
        ("reasoning", {"effort": "ultra"}, "reasoning.effort"),
        ("reasoning", {"summary": "long"}, "reasoning.summary"),
        ("metadata", {"a": 1}, "metadata.a"),
        ("safety_identifier", "x" * 65, "safety_identifier"),
        ("tools", [{**SHELL, "strict": "yes"}], "tools[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_response_could_not_repeat_is_refused(
    frontend: Frontend, field: str, value: Any, param: str, stream: bool
) -> None:
    refused = await frontend.http.post("/v1/responses", json={"input": "hi", field: value, "stream": stream})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
