"""What the HTTP door refuses, and what it does about clients, deadlines and workers that end an answer early."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError

from tests.hand_cut import messages_of
from twostroke.base.errors import DeadlineExceeded, FingerprintMismatch, InternalError, Overloaded, PeerLost
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [300]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": "a" * 256}, "prompt"),
        (TEXT, {"prompt": "a\ud800"}, "prompt"),
        (TEXT, {"prompt": "a", "max_tokens": 256}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (TEXT, {"prompt": "a", "repetition_penalty": 1e39}, "repetition_penalty"),
        (TEXT, {"prompt": "a", "repetition_penalty": 1e-45}, "repetition_penalty"),
        (TEXT, {"prompt": ["a"] * 9, "n": 128}, "n"),
        (TEXT, {"prompt": ["a"] * 1025}, "prompt"),
        (TEXT, {"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids"),
        (TEXT, {"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
        (TEXT, {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        (CHAT, {"messages": ASK, "echo": True}, "echo"),
        (CHAT, {"messages": ASK, "suffix": "b"}, "suffix"),
        (CHAT, {"messages": ASK, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"prompt": [1], "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "suffix": "b", "split_special_tokens": True}, "suffix"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"prompt": [int("9" * 4300)]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text\ud800"}]}]}, "messages[0].content[0].type"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]},
            "messages[0].content[0].text",
        ),
        (CHAT, {"messages": ASK, "chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs.a[0]"),
        (CHAT, {"messages": ASK, "response_format": "\ud800"}, "response_format"),
        (CHAT, {"messages": ASK, "tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0]"),
        (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": "auto"}, "tools"),
        (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": "most"}, "tool_choice"),
        (
            CHAT,
            {"messages": ASK, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        (CHAT, {"messages": ASK, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": [*ASK, {"role": "assistant", "tool_calls": [5]}]}, "messages[1].tool_calls[0].function"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"messages": ASK, "tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {"messages": ASK, "audio": {"voice": "x"}}, "audio"),
        (CHAT, {"messages": ASK, "top_logprobs": 3}, "top_logprobs"),
        (
            CHAT,
            {"messages": ASK, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
async def test_bad_fields_are_refused_by_name(app, path, body, param):
    dispatcher, http = app
    answer = await http.post(path, content=json.dumps(body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert dispatcher.requests == []


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 5000, b"1" * 5000, b""])
async def test_bodies_that_are_not_json_objects_are_refused(app, body):
    answer = await app[1].post(TEXT, content=body)
    assert answer.status_code == 400
    assert "the body" in answer.json()["error"]["message"]


async def test_fields_that_ask_for_nothing_and_unknown_fields_are_accepted(frontend):
    body = {
        "messages": ASK,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "store": False,
        "temperature": None,
        "n": None,
    }
    assert (await frontend.http.post(CHAT, json=body)).status_code == 200


async def test_tools_that_shall_not_be_called_and_histories_of_calls_are_accepted_from_a_stock_client(frontend):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    ]
    answer = await frontend.openai.chat.completions.create(
        model="toy", messages=messages, tools=[TOOL], tool_choice="none"
    )
    assert answer.choices[0].message.content == "hello"
    assert bytes(frontend.dispatcher.requests[0].prompt).endswith(b"tool: blue\nassistant: ")


async def test_a_prompt_larger_than_the_pool_is_told_how_much_fits(frontend):
    frontend.limit(max_model_len=4096, pool_tokens=64)
    with pytest.raises(BadRequestError, match="page pool fits 64") as refused:
        await frontend.openai.completions.create(model="toy", prompt="a" * 64)
    assert refused.value.param == "prompt"
    with pytest.raises(BadRequestError, match="page pool fits 64") as refused:
        await frontend.openai.completions.create(model="toy", prompt="a" * 60, max_tokens=5)
    assert refused.value.param == "max_tokens"
    await frontend.openai.completions.create(model="toy", prompt="a" * 60, max_tokens=4)


async def test_an_unknown_model_is_not_found(frontend):
    with pytest.raises(NotFoundError) as refused:
        await frontend.openai.chat.completions.create(model="gpt", messages=ASK)
    assert refused.value.code == "model_not_found"
    with pytest.raises(NotFoundError):
        await frontend.openai.models.retrieve("gpt")


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_oversized_body_is_refused_with_413(frontend, chunked):
    async def in_pieces():
        for _ in range(40):
            yield b"x" * 4096

    answer = await frontend.http.post(TEXT, content=in_pieces() if chunked else b"x" * (40 * 4096))
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await frontend.http.post(TEXT, json={"prompt": "a"})).status_code == 200


async def test_an_overloaded_worker_shows_as_429_that_may_be_retried(frontend):
    frontend.dispatcher.failure = Overloaded("1024 requests are waiting")
    for stream in (False, True):
        answer = await frontend.http.post(TEXT, json={"prompt": "a", "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"


async def test_a_failure_in_mid_stream_is_an_error_event_and_the_end(frontend):
    frontend.dispatcher.failure, frontend.dispatcher.failure_after = Overloaded("gone"), 2
    stream = await frontend.openai.completions.create(model="toy", prompt="a", stream=True)
    texts = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].text)

    with pytest.raises(APIError, match="gone"):
        await read()
    assert texts == ["h", "e"]


async def test_a_deadline_that_has_passed_is_504(frontend):
    answer = await frontend.http.post(TEXT, json={"prompt": "a"}, headers={"x-request-timeout-s": "0"})
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert frontend.dispatcher.requests == []


DAY_S = 86_400


async def test_a_timeout_of_more_than_a_day_is_a_day(frontend):
    begun_s = time.time()
    for timeout in (1e10, 10**300):
        by_header = {"x-request-timeout-s": str(timeout)}
        assert (await frontend.http.post(TEXT, json={"prompt": "a"}, headers=by_header)).status_code == 200
        assert (await frontend.http.post(TEXT, json={"prompt": "a", "timeout": timeout})).status_code == 200
    call = inference_pb2_grpc.InferenceStub(frontend.channel).Generate(
        inference_pb2.GenerateRequest(text="a"), timeout=1e9
    )
    assert [message async for message in call]
    assert len(frontend.dispatcher.requests) == 5
    for request in frontend.dispatcher.requests:
        assert begun_s + DAY_S - 1 < request.deadline_s <= time.time() + DAY_S


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_numbers_that_no_reply_could_repeat_are_refused(frontend, number):
    body = f'{{"input": "a", "metadata": {{"a": {number}}}}}'
    answer = await frontend.http.post("/v1/responses", content=body)
    assert answer.status_code == 400
    assert f"{number} is not a finite number" in answer.json()["error"]["message"]


@pytest.mark.parametrize("timeout", ["inf", "-inf", "nan", "-1", "1e400"])
async def test_a_timeout_that_is_no_time_is_refused(frontend, timeout):
    answer = await frontend.http.post(TEXT, json={"prompt": "a"}, headers={"x-request-timeout-s": timeout})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout-s"
    said = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(timeout, timeout)
    answer = await frontend.http.post(TEXT, content=f'{{"prompt": "a", "timeout": {said}}}')
    assert answer.status_code == 400
    assert not frontend.dispatcher.requests


async def test_a_deadline_ends_an_answer_before_its_first_token_and_in_mid_stream(frontend):
    frontend.dispatcher.stalls = True
    answer = await frontend.http.post(TEXT, json={"prompt": "a", "stream": True, "timeout": 0.2})
    assert answer.status_code == 504
    frontend.dispatcher.failure_after = 2
    answer = await frontend.http.post(TEXT, json={"prompt": "a", "stream": True, "timeout": 2.0})
    assert answer.status_code == 200
    messages = messages_of(answer.content)
    assert messages[-1]["error"]["code"] == "deadline_exceeded"
    assert len(messages) == 3
    assert frontend.dispatcher.open_ids == set()
    assert frontend.dispatcher.requests[-1].deadline_s is not None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_a_client_that_goes_away_frees_its_request(frontend, stream, tokens_before):
    frontend.dispatcher.stalls, frontend.dispatcher.failure_after = True, tokens_before
    ask = asyncio.create_task(frontend.http.post(TEXT, json={"prompt": ["a", "b"], "n": 2, "stream": stream}))
    await frontend.dispatcher.stalled.wait()
    assert frontend.dispatcher.open_ids
    ask.cancel()
    await frontend.dispatcher.all_closed.wait()
    assert frontend.dispatcher.open_ids == set()


async def test_a_client_that_goes_away_before_its_body_is_complete_leaves_nothing(frontend):
    host, port = frontend.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await frontend.http.post(TEXT, json={"prompt": "a"})).status_code == 200
    assert len(frontend.dispatcher.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "requests"),
    [
        (DeadlineExceeded("the deadline has passed"), 1),
        (InternalError("a bug"), 1),
        (FingerprintMismatch("two workers differ"), 1),
        (Overloaded("busy for long", retry_after_s=61.0), 1),
        (PeerLost("no decode worker is known"), 3),
        (Overloaded("busy", retry_after_s=0.01), 3),
    ],
)
async def test_the_stock_client_tries_again_only_what_may_help(frontend, monkeypatch, failure, requests, stream):
    """Its own backoff is half a second and more."""
    monkeypatch.setattr(AsyncOpenAI, "_calculate_retry_timeout", lambda *of: 0.0)
    frontend.dispatcher.failure = failure
    client = frontend.openai.with_options(max_retries=2)
    with pytest.raises(APIStatusError):
        await client.chat.completions.create(model="toy", messages=ASK, stream=stream)
    assert len(frontend.dispatcher.requests) == requests
