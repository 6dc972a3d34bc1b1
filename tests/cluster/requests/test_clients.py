"""Clients of the field against the real thing: the openai package, and a stub a stranger generated from our .proto."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.cluster.processes import ProcessCluster, running_cluster
from tests.cluster.served import CHECKOUT
from tests.trials.clients.asks import Served
from tests.trials.clients.stock import ANTHROPIC, OPENAI, TRITONCLIENT, StockClient
from twostroke.config import DEFAULT_MODEL, ModelConfig
from twostroke.models.catalog.fetch import fetch

QUESTION = "What is the capital of France?"
PROTOS = CHECKOUT / "proto"

STRANGER = """
import sys
sys.path.insert(0, sys.argv[1])
import grpc
from twostroke.rpc.v1 import inference_pb2 as pb, inference_pb2_grpc as rpc

channel = grpc.insecure_channel(sys.argv[2])
stub = rpc.InferenceStub(channel)
request = pb.GenerateRequest(
    chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")]),
    sampling=pb.SamplingOptions(temperature=0),
    stop=pb.StopOptions(max_tokens=20),
)
messages = list(stub.Generate(request, timeout=60))
print(len([m for m in messages if m.token_ids]), messages[-1].usage.completion_tokens)
print("".join(m.text for m in messages))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    """In bfloat16, in which a token takes a seventh of what it takes in float32."""
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(dtype="bfloat16"),
        model_dir=fetch(DEFAULT_MODEL, "bfloat16", lambda stage, part: None),
    ) as started:
        yield started


@pytest.mark.asyncio(loop_scope="module")
async def test_the_openai_package_chats_and_streams(cluster: ProcessCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none") as client:
        message = {"role": "user", "content": QUESTION}
        whole = await client.chat.completions.create(
            model="smollm2-135m",
            messages=[message],  # type: ignore[list-item]
            max_tokens=20,
            temperature=0,
        )
        assert "Paris" in (whole.choices[0].message.content or "")
        assert whole.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model="smollm2-135m",
            messages=[message],  # type: ignore[list-item]
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        usage = chunks[-1].usage
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 32, "two full blocks of the same prompt"
        assert [model.id async for model in client.models.list()] == ["smollm2-135m"]


@pytest.mark.asyncio(loop_scope="module")
async def test_stop_strings_and_logprobs_through_the_openai_package(cluster: ProcessCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none") as client:
        answer = await client.completions.create(
            model="smollm2-135m", prompt="1, 2, 3, 4,", max_tokens=30, temperature=0, stop=["8"], logprobs=2
        )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text.startswith(" 5, 6, 7")
        assert "8" not in answer.choices[0].text
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stub_generated_from_our_proto_by_a_stranger_streams(cluster: ProcessCluster, tmp_path: Path) -> None:
    proto = PROTOS / "twostroke/rpc/v1/inference.proto"
    command = ["-m", "grpc_tools.protoc", f"-I{PROTOS}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    subprocess.run([sys.executable, *command, str(proto)], check=True)  # noqa: ASYNC221  # half a second, once
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STRANGER, str(tmp_path), cluster.grpc, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    out, _ = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0
    counts, text = out.decode().split("\n", 1)
    messages, completion_tokens = map(int, counts.split())
    assert messages == completion_tokens, "every token is its own message"
    assert "Paris" in text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "client",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (OPENAI, ANTHROPIC)), TRITONCLIENT],
    ids=lambda client: client.name,
)
async def test_a_stock_client_in_its_own_environment_sees_the_right_texts_and_token_counts(
    cluster: ProcessCluster, client: StockClient, smollm2_dir: Path
) -> None:
    """Whole and as a stream, chats and completions, with usage; and it knows a request that is too long as such."""
    if not client.is_installed:
        pytest.skip(f"make .clients installs {client.name} below {client.home}")
    served = Served(cluster.http, "smollm2-135m", smollm2_dir, cluster.grpc)
    expected = await asyncio.to_thread(served.expected)
    assert "Paris" in expected["chat, whole"]["text"]
    assert await asyncio.to_thread(client.problems, served, expected) == []
