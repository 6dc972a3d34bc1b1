"""Text that is held back, for a stop string or the rest of a character, makes no empty message in any stream."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hand_cut import messages_of
from tests.named_events import named_events_of
from tests.unit.router.conftest import Frontend
from tests.unit.router.dialects.kserve.test_infer import ask, said, streamed
from twostroke.request import SampledToken

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PIECES = ["o", "n", "e", " ", "STé"]
"""What comes with "one STé" where "STOP" is a stop string."""


@pytest.fixture
def holding(frontend: Frontend) -> Frontend:
    frontend.dispatcher.script = lambda request, index: [SampledToken(byte) for byte in "one STé".encode()]
    return frontend


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}])
async def test_chats_and_completions(holding: Frontend, usage: dict[str, Any]) -> None:
    body = {"stream": True, "stop": "STOP", **usage}
    for path, asked, others in (("/v1/chat/completions", ASK, 2), ("/v1/completions", {"prompt": "hi"}, 1)):
        chunks = messages_of((await holding.http.post(path, json=asked | body)).content)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
        assert [text for text in texts if text] == PIECES
        assert len(texts) == len(PIECES) + others, "besides the role of a chat and the end"


@pytest.mark.parametrize("include", [[], ["message.output_text.logprobs"]])
async def test_responses_and_messages(holding: Frontend, include: list[str]) -> None:
    holding.dispatcher.script = lambda request, index: [SampledToken(byte, -0.5) for byte in "one STé".encode()]
    asked = {
        "/v1/responses": {"input": "hi", "stop": "STOP", "include": include},
        "/v1/messages": ASK | {"stop_sequences": ["STOP"]},
    }
    for path, body in asked.items():
        further = {"stream": True} | ({"max_tokens": 99} if path == "/v1/messages" else {})
        answer = await holding.http.post(path, json=body | further)
        deltas = [event["delta"] for _, event in named_events_of(answer.text) if "delta" in event]
        texts = [delta if isinstance(delta, str) else delta.get("text") for delta in deltas]
        assert "".join(text for text in texts if text) == "one STé"
        assert "" not in texts


async def test_kserve(holding: Frontend) -> None:
    body = {"text_input": "abc", "parameters": {"stop": ["STOP"], "return_num_output_tokens": True}}
    got = messages_of((await holding.http.post("/v2/models/toy/generate_stream", json=body)).content)
    assert [message["text_output"] for message in got] == [*PIECES, ""]
    assert sum(message["num_output_tokens"] for message in got) == 8
    parameters = {"stop": "STOP", "return_num_output_tokens": True}
    responses = [said(each.infer_response) for each in await streamed(holding, ask(stream=True, parameters=parameters))]
    assert [response["text_output"] for response in responses] == [[text] for text in [*PIECES, ""]]
