"""Chunks that differ in nothing but their text are made of a frame, and say what whole chunks say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.dialects.openai.reply import OpenAIReply
from router.dialects.openai.schema import OpenAIRequest
from router.preparation.prepare import prepare
from router.requests.resume import SentProgress, StreamPoint
from router.requests.work import Work
from router.text.output.events import TextEvent, Usage
from router.text.tokenizer import ByteText
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
    return [json.loads(message.partition("data: ")[2]) for message in messages.split("\n\n") if message]


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


class CountingText(ByteText):
    """Counts the tokens whose bytes are asked for."""

    asked = 0

    def token_bytes(self, token: int) -> bytes:
        self.asked += 1
        return super().token_bytes(token)


def test_the_text_of_an_echoed_prompt_is_measured_once_for_all_of_its_choices() -> None:
    """It is measured on the event loop: for each of 128 choices of a long prompt it would take seconds."""
    body = {"prompt": ["a" * 30, "b" * 7], "echo": True, "logprobs": 0, "n": 16}
    request = prepare(Work("/v1/completions", json.dumps(body).encode(), "toy", FACTS), ByteText()).value
    point, text = StreamPoint.begin("r", 32), CountingText()
    reply = OpenAIReply(request, point, "toy", text, SentProgress(point))
    assert text.asked == 37
    assert [choice.offset for choice in reply._choices] == [30] * 16 + [7] * 16
