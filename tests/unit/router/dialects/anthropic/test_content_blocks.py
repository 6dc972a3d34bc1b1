"""Content blocks of an answer: the events of a stream, put together as clients do, are the whole blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.dialects.anthropic.content_blocks import ContentBlocks
from router.text.output.parts import Part, ReasoningPart, TextPart, ToolCallPart

ANSWER: tuple[Part, ...] = (
    TextPart(""),
    ReasoningPart("I should "),
    ReasoningPart('"look".\n'),
    TextPart("Let me "),
    TextPart(""),
    TextPart("see 猫🙂"),
    ToolCallPart(0, "c0", "weather"),
    ToolCallPart(0, "c0", arguments='{"city": '),
    ToolCallPart(0, "c0", arguments='"Paris"}'),
    ToolCallPart(1, "c1", "time"),
    TextPart("done"),
)


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for event in text.split("\n\n")[:-1]:
        head, _, data = event.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert head == f"event: {value['type']}"
        events.append(value)
    return events


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Does what Anthropic's package does with the events of blocks."""
    blocks: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                is_open = True
                blocks.append(event["content_block"])
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
            case "content_block_delta":
                assert is_open
                block, delta = blocks[event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
                        block["input"] = {}
    assert not is_open
    for index, text in texts.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


def test_the_events_of_a_stream_make_the_whole_blocks() -> None:
    streamed, whole = ContentBlocks("s"), ContentBlocks("s")
    events = "".join(map(streamed.events, ANSWER)) + streamed.end()
    for part in ANSWER:
        whole.add(part)
    assert put_together(events_of(events)) == whole.whole()
    assert whole.whole() == [
        {"type": "thinking", "thinking": 'I should "look".\n', "signature": "s"},
        {"type": "text", "text": "Let me see 猫🙂"},
        {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "c1", "name": "time", "input": {}},
        {"type": "text", "text": "done"},
    ]
    assert streamed.has_calls
    assert whole.has_calls


def test_an_answer_without_a_word_has_no_blocks() -> None:
    blocks = ContentBlocks("s")
    assert blocks.events(TextPart("")) + blocks.end() == ""
    assert blocks.whole() == []
    assert not blocks.has_calls


def test_an_empty_text_does_not_end_the_block_before_it() -> None:
    blocks = ContentBlocks("s")
    events = [blocks.events(part) for part in (ReasoningPart("a"), TextPart(""), ReasoningPart("b"))]
    assert [len(events_of(event)) for event in events] == [2, 0, 1]


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "[" * 100_000])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    blocks = ContentBlocks("s")
    blocks.add(ToolCallPart(0, "c0", "weather", arguments))
    assert blocks.whole()[0]["input"] == {"INVALID_JSON": arguments}
