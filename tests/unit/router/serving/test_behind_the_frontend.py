"""Both halves of the router together: HTTP and gRPC clients before the doors, real dispatch and fake workers behind."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import httpx

from router.branches import BRANCHES
from router.metrics import RouterMetrics
from router.server import RouterServer
from router.text.tokenizer import ByteText
from tests.hand_cut import HandCut
from tests.inline_preparer import InlinePreparer
from twostroke.config import ListenConfig, RouterConfig
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

PROMPT = list(range(100))
LENGTH = 20


@asynccontextmanager
async def frontend(fleet):
    """A client of each kind."""
    core = await fleet.core()
    config = RouterConfig(listen=ListenConfig(http_port=0, grpc_port=0), served_model_name="toy")
    server = RouterServer(
        config, core, InlinePreparer(ByteText()), RouterMetrics(), router_id=core.router_id, branches=BRANCHES
    )
    async with (
        server.serving(),
        httpx.AsyncClient(base_url=f"http://{server.addresses.http}", timeout=60) as http,
        grpc.aio.insecure_channel(server.addresses.grpc) as channel,
    ):
        yield http, inference_pb2_grpc.InferenceStub(channel)


def body(**fields):
    return {"prompt": PROMPT, "max_tokens": LENGTH, "return_token_ids": True, **fields}


async def whole(http, **fields) -> dict:
    answer = await http.post("/v1/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def test_an_answer_is_the_same_through_either_door(fleet):
    await fleet.add("decode-0")
    async with frontend(fleet) as (http, stub):
        choice = await whole(http)
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT), stop=inference_pb2.StopOptions(max_tokens=LENGTH)
        )
        messages = [message async for message in stub.Generate(request)]
    assert len(choice["token_ids"]) == LENGTH
    assert [token for message in messages for token in message.token_ids] == choice["token_ids"]
    assert "".join(message.text for message in messages) == choice["text"]
    assert messages[-1].usage.cached_tokens == 6 * 16


async def test_a_stop_string_ends_the_answer_at_the_worker_too(fleet, soon):
    worker = await fleet.add("decode-0")
    async with frontend(fleet) as (http, _):
        tokens = (await whole(http))["token_ids"]
        worker.hold_at = 6
        split_stop = f"{tokens[3]}><{tokens[4]}"
        choice = await whole(http, stop=split_stop)
        await soon(lambda: len(worker.closed) == 1)
    assert choice["finish_reason"] == "stop"
    assert choice["text"].endswith("<")
    assert choice["token_ids"] == tokens[:5]


async def test_a_client_that_goes_away_closes_its_answers_at_the_worker(fleet, soon):
    worker = await fleet.add("decode-0", hold_at=3)
    async with frontend(fleet) as (http, _):
        ask = asyncio.create_task(http.post("/v1/completions", json=body(n=2, stream=True)))
        await soon(lambda: len(worker.opens) == 2)
        ask.cancel()
        await soon(lambda: len(worker.closed) == 2)


async def test_a_stream_goes_on_without_a_gap_when_its_worker_dies(fleet):
    first = await fleet.add("decode-0", hold_at=7)
    async with frontend(fleet) as (http, _):
        tokens: list[int] = []
        async with http.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
            reader = HandCut()
            async for data in answer.aiter_bytes():
                for message in reader.feed(data):
                    tokens += message["choices"][0]["token_ids"]
                if len(tokens) == 7 and "decode-1" not in fleet.workers:
                    await fleet.add("decode-1")
                    await first.kill()
                    await fleet.remove("decode-0")
        assert tokens == (await whole(http))["token_ids"]


async def test_a_deadline_ends_the_answer_at_the_worker_too(fleet, soon):
    worker = await fleet.add("decode-0", hold_at=3)
    async with frontend(fleet) as (http, _):
        answer = await http.post("/v1/completions", json=body(timeout=0.3))
        assert answer.status_code == 504
        await soon(lambda: len(worker.closed) == 1)
