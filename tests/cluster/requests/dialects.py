"""A dialogue with tools in each dialect that has them: the same turns go in, the same text and calls come out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.hand_cut import messages_of
from tests.named_events import named_events_of
from tests.published_api import PublishedApi
from tests.unit.router.dialects.anthropic.test_content_blocks import put_together

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Called:
    call_id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    calls: Sequence[Called] = ()

    @property
    def says(self) -> tuple[str, list[tuple[str, Any]]]:
        """The text, and names and arguments of the calls: all but ids and the writing of JSON."""
        return self.text, [(call.name, json.loads(call.arguments)) for call in self.calls]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A question, and what its calls returned, if it has been answered with calls."""

    system: str
    question: str
    tools: Sequence[Json]
    """In OpenAI's form of chats."""
    answer: Answer | None = None
    results: Mapping[str, str] = field(default_factory=dict)
    """What each call returned, by the call's id."""


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    path: str
    body: Callable[[Dialogue], Json]
    whole: Callable[[Json], Answer]
    streamed: Callable[[str], Answer]
    check: Callable[[PublishedApi, Json, Json, str], None]
    """Checks a request, its whole answer and its stream against what the dialect's maker published."""


def _chat(dialogue: Dialogue) -> Json:
    messages: list[Json] = [{"role": "user", "content": dialogue.question}]
    if dialogue.system:
        messages.insert(0, {"role": "system", "content": dialogue.system})
    if dialogue.answer is not None:
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in dialogue.answer.calls
        ]
        messages.append({"role": "assistant", "content": dialogue.answer.text or None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call, "content": said} for call, said in dialogue.results.items()]
    return {"messages": messages, "tools": list(dialogue.tools)}


def _whole_chat(body: Json) -> Answer:
    (choice,) = body["choices"]
    calls = choice["message"].get("tool_calls") or []
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    functions = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return Answer(choice["message"]["content"] or "", [Called(*function) for function in functions])


def _streamed_chat(stream: str) -> Answer:
    text, calls = "", list[list[str]]()
    for chunk in messages_of(stream.encode()):
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                if piece["index"] == len(calls):
                    calls.append([piece["id"], piece["function"]["name"], ""])
                calls[piece["index"]][2] += piece["function"].get("arguments") or ""
    return Answer(text, [Called(*call) for call in calls])


def _check_chat(api: PublishedApi, asked: Json, whole: Json, stream: str) -> None:
    api.check("CreateChatCompletionRequest", asked)
    api.check("CreateChatCompletionResponse", whole)
    for chunk in messages_of(stream.encode()):
        api.check("CreateChatCompletionStreamResponse", chunk)


def _response(dialogue: Dialogue) -> Json:
    items: list[Json] = [{"role": "user", "content": dialogue.question}]
    for call in dialogue.answer.calls if dialogue.answer else ():
        items.append({"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments})
    items += [
        {"type": "function_call_output", "call_id": call, "output": said} for call, said in dialogue.results.items()
    ]
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in dialogue.tools]
    return {"instructions": dialogue.system or None, "input": items, "tools": tools}


def _whole_response(body: Json) -> Answer:
    assert body["status"] == "completed"
    text = "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    return Answer(text, [Called(call["call_id"], call["name"], call["arguments"]) for call in calls])


def _streamed_response(stream: str) -> Answer:
    """Joins deltas, and checks that the last event's response says the same."""
    text, arguments = "", dict[int, str]()
    for kind, event in named_events_of(stream):
        if kind == "response.output_text.delta":
            text += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            arguments[event["output_index"]] = arguments.get(event["output_index"], "") + event["delta"]
    answer = _whole_response(event["response"])
    assert (text, list(arguments.values())) == (answer.text, [call.arguments for call in answer.calls])
    return answer


def _check_response(api: PublishedApi, asked: Json, whole: Json, stream: str) -> None:
    api.check("CreateResponse", asked)
    api.check("Response", whole)
    for _, event in named_events_of(stream):
        api.check_event(event)


def _message(dialogue: Dialogue) -> Json:
    messages: list[Json] = [{"role": "user", "content": dialogue.question}]
    if dialogue.answer is not None:
        uses = [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}
            for call in dialogue.answer.calls
        ]
        results = [
            {"type": "tool_result", "tool_use_id": call, "content": said} for call, said in dialogue.results.items()
        ]
        messages += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    functions = [tool["function"] for tool in dialogue.tools]
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in functions
    ]
    return {"system": dialogue.system, "messages": messages, "tools": tools, "max_tokens": 100}


def _whole_message(body: Json) -> Answer:
    answer = _of_blocks(body["content"])
    assert body["stop_reason"] == ("tool_use" if answer.calls else "end_turn")
    return answer


def _streamed_message(stream: str) -> Answer:
    return _of_blocks(put_together([event for _, event in named_events_of(stream)]))


def _of_blocks(blocks: Sequence[Json]) -> Answer:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return Answer(text, [Called(call["id"], call["name"], json.dumps(call["input"])) for call in calls])


def _check_nothing(api: PublishedApi, asked: Json, whole: Json, stream: str) -> None:
    """Anthropic publishes no description; reading the answer checks its form."""


DIALECTS = (
    Dialect("chat", "/v1/chat/completions", _chat, _whole_chat, _streamed_chat, _check_chat),
    Dialect("responses", "/v1/responses", _response, _whole_response, _streamed_response, _check_response),
    Dialect("messages", "/v1/messages", _message, _whole_message, _streamed_message, _check_nothing),
)


def ask(url: str, dialect: Dialect, dialogue: Dialogue, api: PublishedApi | None, **options: Any) -> Answer:
    """Returns the answer to a greedy request. It comes whole and streamed, and both must say the same."""
    body = dialect.body(dialogue) | {"temperature": 0} | options
    with httpx.Client(base_url=url, timeout=300) as http:
        whole = http.post(dialect.path, json=body)
        assert whole.status_code == 200, whole.text
        stream = http.post(dialect.path, json=body | {"stream": True})
        assert stream.status_code == 200, stream.text
    if api is not None:
        dialect.check(api, body, whole.json(), stream.text)
    answer = dialect.whole(whole.json())
    assert dialect.streamed(stream.text).says == answer.says
    return answer
