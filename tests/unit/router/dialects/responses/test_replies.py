"""Responses and their events, of answers whose parts are made by hand."""

from __future__ import annotations

import json
from typing import Any

from router.dialects.responses.items import messages_of
from router.dialects.responses.reply import ResponsesReply
from router.dialects.responses.schema import parse_response
from router.requests.resume import SentProgress, StreamPoint
from router.text.output.events import TextEvent, Usage
from router.text.output.parts import Part, ReasoningPart, TextPart, ToolCallPart
from router.text.tokenizer import ByteText
from tests.named_events import named_events_of
from tests.unit.router.dialects.responses.codex import PATCH, SHELL
from twostroke.base.errors import InternalError, Overloaded
from twostroke.request import FinishReason, SampledToken

Json = dict[str, Any]

PARTS: list[tuple[Part, ...]] = [
    (ReasoningPart("so"),),
    (ReasoningPart(" be it"), TextPart("I ")),
    (TextPart("look."),),
    (ToolCallPart(0, "call_0", "shell"),),
    (ToolCallPart(0, "call_0", "", '{"command"'),),
    (ToolCallPart(0, "call_0", "", ':["ls"]}'), ToolCallPart(1, "call_1", "apply_patch", '{"inp')),
    (ToolCallPart(1, "call_1", "", 'ut":"*** Begin"}'),),
]
USAGE = Usage(prompt_tokens=9, completion_tokens=8, cached_tokens=4)


def reply_to(**options: Any) -> ResponsesReply:
    body = {"input": "hi", "tools": [SHELL, PATCH], "tool_choice": "none"} | options
    point = StreamPoint.begin("r", 1)
    return ResponsesReply(parse_response(body), point, "toy", ByteText(), SentProgress(point))


def events_of(parts: list[tuple[Part, ...]], finish: FinishReason = FinishReason.STOP) -> list[TextEvent]:
    tokens = [TextEvent(0, "raw", 9, rank, SampledToken(1), parts=each) for rank, each in enumerate(parts, 1)]
    return [*tokens, TextEvent(0, "", 9, len(parts), finish=finish, usage=USAGE)]


def streamed(reply: ResponsesReply, events: list[TextEvent]) -> list[tuple[str, Json]]:
    return named_events_of("".join(map(reply.messages, events)) + reply.end())


def whole(reply: ResponsesReply, events: list[TextEvent]) -> Json:
    for event in events:
        reply.add(event)
    return reply.body()


def test_events_come_in_order_and_are_counted() -> None:
    events = streamed(reply_to(), events_of(PARTS))
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]


def test_the_last_event_has_what_a_whole_response_says() -> None:
    _, data = streamed(reply_to(), events_of(PARTS))[-1]
    body = whole(reply_to(), events_of(PARTS))
    for response in (data["response"], body):
        del response["created_at"], response["completed_at"]
    assert data["response"] == body


def test_every_item_is_done_as_it_stands_in_the_response() -> None:
    events = streamed(reply_to(), events_of(PARTS))
    done = [data for name, data in events if name == "response.output_item.done"]
    assert [data["output_index"] for data in done] == [0, 1, 2, 3]
    assert [data["item"] for data in done] == events[-1][1]["response"]["output"]
    ids = [data["item"]["id"] for data in done]
    assert len(set(ids)) == 4
    assert {data["item_id"] for _, data in events if "item_id" in data} == set(ids)


def test_deltas_make_the_text_of_their_item() -> None:
    events = streamed(reply_to(), events_of(PARTS))
    for kind, field in (
        ("output_text", "text"),
        ("reasoning_text", "text"),
        ("function_call_arguments", "arguments"),
        ("custom_tool_call_input", "input"),
    ):
        deltas = "".join(data["delta"] for name, data in events if name == f"response.{kind}.delta")
        (done,) = [data for name, data in events if name == f"response.{kind}.done"]
        assert deltas == done[field]


def test_items_say_what_the_parts_say() -> None:
    reasoning, message, function, custom = whole(reply_to(), events_of(PARTS))["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so be it"}]
    assert message["content"][0]["text"] == "I look."
    assert (function["name"], function["call_id"], function["arguments"]) == ("shell", "call_0", '{"command":["ls"]}')
    assert (custom["name"], custom["call_id"], custom["input"]) == ("apply_patch", "call_1", "*** Begin")


def test_a_custom_call_that_is_not_written_as_it_should_be_is_its_arguments() -> None:
    for written in ('{"input": 5}', "*** Begin", "[1]"):
        (item,) = whole(reply_to(), events_of([(ToolCallPart(0, "c", "apply_patch", written),)]))["output"]
        assert item["input"] == written


def test_tokens_of_reasoning_are_counted_apart() -> None:
    usage = whole(reply_to(), events_of(PARTS))["usage"]
    assert usage == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }


def test_an_answer_that_reached_its_limit_is_incomplete() -> None:
    events = streamed(reply_to(), events_of([(TextPart("I "),)], FinishReason.LENGTH))
    name, data = events[-1]
    assert name == "response.incomplete"
    assert data["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in data["response"]["output"]] == ["incomplete"]


def test_an_answer_without_text_is_an_empty_message() -> None:
    (item,) = whole(reply_to(), events_of([]))["output"]
    assert item["content"][0]["text"] == ""
    assert streamed(reply_to(), events_of([]))[-1][0] == "response.completed"


def test_a_failure_ends_the_stream_with_what_there_was() -> None:
    for error, code in ((InternalError("broken"), "server_error"), (Overloaded("full"), "rate_limit_exceeded")):
        reply = reply_to()
        begun = "".join(map(reply.messages, events_of(PARTS)[:3]))
        name, data = named_events_of(begun + reply.failure(error))[-1]
        response = data["response"]
        assert (name, response["status"]) == ("response.failed", "failed")
        assert response["error"] == {"code": code, "message": error.message}
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_reasoning_is_encoded_for_clients_that_send_it_back() -> None:
    reply = reply_to(include=["reasoning.encrypted_content"])
    item = whole(reply, events_of(PARTS))["output"][0]
    del item["content"]
    *_, message = messages_of([{"role": "user", "content": "x"}, item, {"role": "assistant", "content": "y"}], None)
    assert message["reasoning_content"] == "so be it"


def test_logprobs_come_with_the_text_of_their_tokens() -> None:
    def events() -> list[TextEvent]:
        tokens = [SampledToken(97, -0.5, ((97, -0.5), (98, float("-inf")))), SampledToken(195, -1.0), SampledToken(164)]
        texts = ["a", "", "ä"]
        said = [TextEvent(0, text, 9, 1, token) for text, token in zip(texts, tokens, strict=True)]
        return [
            *said,
            TextEvent(0, "", 9, 3, SampledToken(299, -2.0)),
            TextEvent(0, "", finish=FinishReason.STOP, usage=USAGE),
        ]

    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    stream = streamed(reply_to(**options), events())
    deltas = [data for name, data in stream if name == "response.output_text.delta"]
    assert [(data["delta"], len(data["logprobs"])) for data in deltas] == [("a", 1), ("ä", 2), ("", 1)]
    (item,) = whole(reply_to(**options), events())["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [entry for data in deltas for entry in data["logprobs"]] == logprobs
    assert logprobs[0]["top_logprobs"][1] == {"token": "b", "logprob": -9999.0, "bytes": [98]}
    (item,) = whole(reply_to(top_logprobs=2), events())["output"]
    assert item["content"][0]["logprobs"] == []


def test_deltas_that_differ_in_their_text_alone_are_whole_events() -> None:
    texts = ["plain", '"quoted" \\ and\nnew lines', "猫🙂", "text", "text\0", "0}", "ends"]
    for call in ((), (ToolCallPart(0, "c", "shell", "{}"),)):
        parts: list[tuple[Part, ...]] = [*((TextPart(text),) for text in texts), call, *((TextPart(t),) for t in texts)]
        events = streamed(reply_to(), events_of([each for each in parts if each]))
        deltas = [data for name, data in events if name == "response.output_text.delta"]
        assert [data["delta"] for data in deltas] == texts * 2
        assert all(data["logprobs"] == [] and data["content_index"] == 0 for data in deltas)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        messages = [item for item in events[-1][1]["response"]["output"] if item["type"] == "message"]
        assert [message["content"][0]["text"] for message in messages] == (
            ["".join(texts)] * 2 if call else ["".join(texts * 2)]
        )
        assert {data["item_id"] for data in deltas} == {message["id"] for message in messages}


def test_ids_are_those_of_the_stream() -> None:
    bodies = [json.dumps(whole(reply_to(), events_of(PARTS))["output"]) for _ in range(2)]
    assert bodies[0] == bodies[1]
