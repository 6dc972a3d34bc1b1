"""What a stream says to a client that has asked for nothing special, and what to one that wants to go on elsewhere."""

from __future__ import annotations

import json

import grpc
import grpc.aio
import httpx
import pytest
from openai import APIError

from tests.hand_cut import messages_of
from twostroke.base.errors import Draining, InvalidRequest
from twostroke.request import SampledToken
from twostroke.rpc.channel import error_of
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

ASK = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESUMABLE = {"X-Resumable-Stream": "true"}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": ASK}),
        (CHAT, {"messages": ASK, "n": 2, "logprobs": True}),
        (CHAT, {"messages": ASK, "stop": ["lo"]}),
        (TEXT, {"prompt": "x"}),
        (TEXT, {"prompt": ["x", "y"], "n": 2, "return_token_ids": True}),
    ],
)
async def test_a_stream_is_data_lines_alone_as_clients_read_them_that_were_cut_by_hand(app, path, body):
    _, http = app
    got = await http.post(path, json={**body, **WITH_USAGE})
    assert {line[:6] for line in got.text.splitlines() if line} == {"data: "}
    *messages, last = messages_of(got.content)
    assert messages
    assert last["usage"]["completion_tokens"] == 5 * len(body.get("prompt", "x")) * body.get("n", 1)
    assert last["choices"] == []


async def test_who_asks_to_be_able_to_go_on_gets_the_name_of_every_message(app):
    dispatcher, http = app
    got = await http.post(TEXT, json={"prompt": "x", **WITH_USAGE}, headers=RESUMABLE)
    events = got.text.strip().split("\n\n")
    assert [event.startswith("id: ") for event in events] == [True] * 7 + [False]
    name = events[2].partition("\n")[0].removeprefix("id: ")
    resumed = await http.post(TEXT, json={"prompt": "x", **WITH_USAGE}, headers={"Last-Event-ID": name})
    assert [event.startswith("id: ") for event in resumed.text.strip().split("\n\n")] == [True] * 4 + [False]
    texts = [json.loads(event.partition("\ndata: ")[2])["choices"] for event in resumed.text.split("\n\n")[:3]]
    assert "".join(choices[0]["text"] for choices in texts) == "lo"
    assert [each.is_resumable for each in dispatcher.parents] == [True, True]
    await http.post(TEXT, json={"prompt": "x", **WITH_USAGE}, headers={"X-Resumable-Stream": "FALSE"})
    assert not dispatcher.parents[-1].is_resumable


async def test_what_the_header_may_not_say_is_refused_by_its_name(app):
    _, http = app
    got = await http.post(TEXT, json={"prompt": "x", **WITH_USAGE}, headers={"X-Resumable-Stream": "maybe"})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "x-resumable-stream")


async def test_a_router_that_ends_tells_a_plain_client_so_and_cuts_off_one_that_can_go_on(frontend):
    frontend.dispatcher.failure, frontend.dispatcher.failure_after = Draining("this router ends"), 2
    got = await frontend.http.post(TEXT, json={"prompt": "x", "stream": True})
    assert messages_of(got.content)[-1]["error"]["code"] == "draining"
    stream = await frontend.openai.completions.create(model="toy", prompt="x", stream=True)
    with pytest.raises(APIError, match="this router ends"):
        [chunk async for chunk in stream]
    with pytest.raises(httpx.RemoteProtocolError):  # no end, so that it looks for one elsewhere
        await frontend.http.post(TEXT, json={"prompt": "x", "stream": True}, headers=RESUMABLE)


@pytest.mark.parametrize("role", ["admin", "", "User", "<|im_start|>", None, 7])
async def test_an_unknown_role_is_refused_by_name(frontend, role):
    messages = [*ASK, {"role": role, "content": "x"}]
    got = await frontend.http.post(CHAT, json={"messages": messages})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "messages[1].role")
    if not isinstance(role, str):
        return
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=each) for each in ("user", role)])
    call = inference_pb2_grpc.InferenceStub(frontend.channel).Generate(inference_pb2.GenerateRequest(chat=chat))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    error = error_of(refused.value, "")
    assert isinstance(error, InvalidRequest)
    assert error.field == "messages[1].role"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
async def test_the_roles_of_openais_api_are_taken(app, role):
    _, http = app
    got = await http.post(CHAT, json={"messages": [{"role": role, "content": "x"}]})
    assert got.status_code == 200


async def test_continuous_usage_counts_the_tokens_of_each_choice_so_far(app):
    dispatcher, http = app
    dispatcher.script = lambda request, index: [SampledToken(byte) for byte in ("ab", "xyz")[index].encode()]
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await http.post(CHAT, json={"messages": ASK, "n": 2, "stream": True, "stream_options": options})
    *messages, last = messages_of(got.content)
    prompt_tokens = len(dispatcher.requests[0].prompt)
    for index, counts in enumerate([[0, 1, 2, 2], [0, 1, 2, 3, 3]]):
        mine = [message["usage"] for message in messages if message["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in mine] == counts
        assert {usage["prompt_tokens"] for usage in mine} == {prompt_tokens}
        assert all(usage["total_tokens"] == prompt_tokens + usage["completion_tokens"] for usage in mine)
    assert last["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("value", [1, "yes", {}])
async def test_continuous_usage_that_is_no_boolean_is_refused_by_name(app, value):
    _, http = app
    options = {"include_usage": True, "continuous_usage_stats": value}
    got = await http.post(TEXT, json={"prompt": "x", "stream": True, "stream_options": options})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "stream_options.continuous_usage_stats")
