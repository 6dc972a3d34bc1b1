"""A request that is too long says so in the words and codes by which clients recognise it."""

from __future__ import annotations

import re

import grpc
import grpc.aio
import pytest
from openai import BadRequestError

from twostroke.base.errors import ContextLengthExceeded
from twostroke.rpc.channel import error_of
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

ASK = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
AGENTS_PATTERN = r"maximum context length is (\d+) tokens\. However, you requested (\d+) tokens \((\d+) in the"
"""Agents that ask for less on a second try read the numbers so."""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "a" * 300}, "prompt"),
        (TEXT, {"prompt": "a" * 256}, "prompt"),
        (TEXT, {"prompt": [65] * 300}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
        (TEXT, {"prompt": "a", "max_tokens": 256}, "max_tokens"),
        (CHAT, {"messages": ASK, "max_tokens": 256}, "max_tokens"),
        (CHAT, {"messages": ASK, "max_completion_tokens": 10**12}, "max_completion_tokens"),
        (CHAT, {"messages": ASK, "stream": True, "max_completion_tokens": 256}, "max_completion_tokens"),
    ],
)
async def test_too_long_over_http_has_openais_code_type_and_sentence(app, path, body, param):
    _, http = app
    refused = await http.post(path, json=body)
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert (error["code"], error["type"], error["param"]) == (
        "context_length_exceeded",
        "invalid_request_error",
        param,
    )
    assert "This model's maximum context length is 256 tokens. However, " in error["message"]
    assert error["message"].endswith("(context_length_exceeded)")  # where LangChain looks for it


async def test_an_oversized_answer_says_how_much_the_prompt_takes(app):
    _, http = app
    refused = await http.post(TEXT, json={"prompt": "a" * 60, "max_tokens": 200})
    found = re.search(AGENTS_PATTERN, refused.json()["error"]["message"])
    assert found
    assert found.groups() == ("256", "260", "60")


async def test_a_page_pool_smaller_than_the_model_is_the_limit_and_is_named(frontend):
    frontend.limit(max_model_len=4096, pool_tokens=64)
    with pytest.raises(
        BadRequestError, match=r"length is 64 tokens.*page pool fits 64, the model takes 4096"
    ) as refused:
        await frontend.openai.completions.create(model="toy", prompt="a" * 64)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (inference_pb2.GenerateRequest(text="a" * 300), "prompt"),
        (inference_pb2.GenerateRequest(text="a", stop=inference_pb2.StopOptions(max_tokens=256)), "max_tokens"),
    ],
)
async def test_too_long_over_grpc_is_an_invalid_argument_with_the_code_in_trailing_metadata(
    frontend, request_message, field
):
    call = inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request_message)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "maximum context length is 256 tokens" in refused.value.details()
    assert dict(refused.value.trailing_metadata())["twostroke-error-code"] == "context_length_exceeded"
    error = error_of(refused.value, frontend.grpc_address)
    assert isinstance(error, ContextLengthExceeded)
    assert error.field == field
