"""Answers share the turns of the event loop: no client's messages keep it from others."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.requests import request_output
from router.requests.request_output import AT_ONCE, OutputShare
from tests.unit.router.conftest import Frontend
from twostroke.request import SampledToken
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

CHAT = "/v1/chat/completions"
MANY, STEPS = 128, 4
RICH = SampledToken(65, -0.5, tuple((token, -1.0) for token in range(66, 86)))
ASK = {
    "messages": [{"role": "user", "content": "a"}],
    "n": MANY,
    "max_tokens": STEPS,
    "logprobs": True,
    "top_logprobs": 20,
}


async def test_a_client_with_many_messages_lets_one_with_few_go_before_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_output, "TURN_S", 0.0)
    share, order = OutputShare(), list[str]()

    async def write(client: str) -> None:
        if share.is_over:
            await share.wait_for_turn(client)
        order.append(client)

    await asyncio.gather(*(write("many") for _ in range(100)), *(write("few") for _ in range(3)))
    assert len(order) == 103
    assert order[1:7] == ["many", "few"] * 3, "the first one had the turn"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not share.is_over, "nobody waits any more"


async def test_who_leaves_while_it_waits_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_output, "TURN_S", 0.0)
    share, order = OutputShare(), list[int]()

    async def write(number: int) -> None:
        if share.is_over:
            await share.wait_for_turn("a")
        order.append(number)

    writing = [asyncio.create_task(write(number)) for number in range(2 * AT_ONCE)]
    await asyncio.sleep(0)
    assert order == [0]
    writing[1].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*writing, return_exceptions=True)
    assert order == [0, *range(2, 2 * AT_ONCE)]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_messages_of_many_choices_are_spread_over_turns_of_the_loop(
    frontend: Frontend, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_output, "TURN_S", 0.0)
    frontend.dispatcher.script = lambda request, index: [RICH] * STEPS
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    try:
        if protocol == "http":
            answer = await frontend.http.post(CHAT, json={**ASK, "stream": True})
            said = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            tokens = sum(bool(each["choices"][0]["logprobs"]) for each in said)
        else:
            sampling = inference_pb2.SamplingOptions(logprobs=20)
            stop = inference_pb2.StopOptions(max_tokens=STEPS)
            request = inference_pb2.GenerateRequest(text="a", n=MANY, sampling=sampling, stop=stop)
            messages = inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request)
            tokens = sum([len(message.token_ids) async for message in messages])
    finally:
        counting.cancel()
    assert tokens == MANY * STEPS
    assert turns >= tokens / AT_ONCE


async def test_a_long_whole_answer_is_the_same_as_its_parts(frontend: Frontend) -> None:
    frontend.dispatcher.script = lambda request, index: [RICH] * STEPS
    long = (await frontend.http.post(CHAT, json=ASK)).json()
    short = (await frontend.http.post(CHAT, json={**ASK, "n": 1})).json()
    assert len(long["choices"]) == MANY
    for index, choice in enumerate(long["choices"]):
        assert choice == {**short["choices"][0], "index": index}
    assert long["usage"]["completion_tokens"] == MANY * STEPS
