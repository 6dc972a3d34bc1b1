"""Chunks that differ in nothing but their text are made of a frame, and say what whole chunks say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.frontend.openai.reply import OpenAIReply
from router.frontend.openai.schema import OpenAIRequest
from router.frontend.output.events import TextEvent, Usage
from router.frontend.preparation.prepare import Work, prepare
from router.frontend.resume import SentProgress, StreamPoint
from router.frontend.text.tokenizer import ByteText
from tests.unit.router.conftest import FACTS
from twostroke.request import FinishReason, SampledToken

TEXTS = ("plain", '"quoted" \\ and\nnew lines', "猫🙂", "", "text", "\x00", "ends")


def reply_to(**options: Any) -> OpenAIReply:
    body = {"stream": True} | options
    kind = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    request = prepare(Work(kind, json.dumps(body).encode(), 'to"y', FACTS), ByteText()).value
    assert isinstance(request, OpenAIRequest)
    point = StreamPoint.begin("r", 2)
    return OpenAIReply(request, point, 'to"y', ByteText(), SentProgress(point))


def chunks_of(messages: str) -> list[Any]:
    return [json.loads(message.partition("data: ")[2]) for message in messages.removesuffix("\n\n").split("\n\n")]


@pytest.mark.parametrize("asked", [{"messages": [{"role": "user", "content": "x"}]}, {"prompt": "x"}])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_framed_chunks_are_those_that_are_built_whole(asked: dict[str, Any], options: dict[str, Any]) -> None:
    reply, whole = reply_to(**asked, **options), reply_to(**asked, **options)
    whole._head["created"] = reply._head["created"]
    for choice in (0, 1):
        for text in TEXTS:
            event = TextEvent(choice, text, 1, 1, SampledToken(1))
            built = [chunk for _, chunk in whole._chunks(event)]
            assert chunks_of(reply.messages(event)) == built
        assert reply._choices[choice].frame is not None, "only the first was built whole"
    last = TextEvent(0, "", 1, 7, finish=FinishReason.STOP, usage=Usage(1, 7, 0))
    assert chunks_of(reply.messages(last)) == [chunk for _, chunk in whole._chunks(last)]


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 1},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_chunks_that_differ_in_more_are_built_whole(options: dict[str, Any]) -> None:
    reply, whole = reply_to(prompt="x", **options), reply_to(prompt="x", **options)
    whole._head["created"] = reply._head["created"]
    for number in range(3):
        event = TextEvent(0, "t", 1, number, SampledToken(1, -0.5))
        assert chunks_of(reply.messages(event)) == [chunk for _, chunk in whole._chunks(event)]
