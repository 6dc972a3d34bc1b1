"""Streams that outlive their router: real processes, real kills, the paced model."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
import pytest

from tests.cluster.processes import PATIENCE_S, Client, ProcessCluster, generate_request, running_cluster
from tests.metrics_page import total
from tools.clients.resuming import ResumingClient, RouterPatience
from twostroke.config import SPECULATE_OFF, ModelConfig, ScheduleConfig
from twostroke.rpc.v1 import inference_pb2

MODEL = ModelConfig(model="paced:step_ms=12,prefill_tokens_per_s=20000")
STEADY = ScheduleConfig(speculate=SPECULATE_OFF)
"""An answer that was given before takes as long again."""
PROMPT = list(range(1000, 1070))
TOKENS = 60
SILENCE_S = 15.0


@dataclass
class Got:
    """What was received of one stream, by choice."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    roles: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    usages: list[tuple[int, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(map(len, self.tokens.values()))


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled without a seed": {},
    "two choices": {"n": 2, "seed": 5},
    "stop strings": {"temperature": 0.0, "stop": ["qzx", "jjj"]},
    "logprobs": {"logprobs": 2, "seed": 6},
    "penalties": {"seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


@asynccontextmanager
async def two_routers(decode: int = 2) -> AsyncIterator[tuple[ProcessCluster, ResumingClient]]:
    async with (
        running_cluster(prefill=1, decode=decode, routers=2, model=MODEL, schedule=STEADY) as cluster,
        new_client(cluster) as client,
    ):
        yield cluster, client


def new_client(cluster: ProcessCluster) -> ResumingClient:
    endpoints = [cluster.routers[index] for index in sorted(cluster.routers)]
    return ResumingClient(
        grpc=[endpoint.grpc for endpoint in endpoints],
        http=[endpoint.http for endpoint in endpoints],
        patience=RouterPatience(silence_s=SILENCE_S),
    )


async def grpc_stream(client: ResumingClient, got: Got, options: dict[str, Any]) -> Got:
    request = generate_request(PROMPT, max_tokens=TOKENS, ignore_eos=True, **options)
    async for message in client.generate(request):
        got.texts[message.index] += message.text
        got.tokens[message.index] += message.token_ids
        got.logprobs[message.index] += [(entry.token_id, entry.logprob, len(entry.top)) for entry in message.logprobs]
        if message.finish_reason:
            got.finishes[message.index].append(message.finish_reason)
        if message.HasField("usage"):
            got.usages.append((message.usage.prompt_tokens, message.usage.completion_tokens))
    return got


async def chat_stream(client: ResumingClient, got: Got, options: dict[str, Any]) -> Got:
    body = {
        "messages": [{"role": "user", "content": "Tell me everything." * 3}],
        "max_tokens": TOKENS,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": options["logprobs"]}
    async for chunk in client.stream("/v1/chat/completions", body):
        if not chunk["choices"]:
            got.usages.append((chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]))
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            got.roles[index] += "role" in delta
            got.texts[index] += delta.get("content") or ""
            got.tokens[index] += choice.get("token_ids") or []
            got.logprobs[index] += (choice["logprobs"] or {}).get("content") or []
            if choice["finish_reason"]:
                got.finishes[index].append(choice["finish_reason"])
    return got


STREAMS = [(endpoint, kind) for endpoint in (grpc_stream, chat_stream) for kind in KINDS]


async def all_streams(client: ResumingClient, progress: list[Got]) -> list[Got]:
    """One of every kind over each door, at once."""
    progress[:] = [Got() for _ in STREAMS]
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(
            *(endpoint(client, got, KINDS[kind]) for got, (endpoint, kind) in zip(progress, STREAMS, strict=True))
        )


async def until_total(progress: list[Got], total: int) -> None:
    while sum(got.total for got in progress) < total:
        await asyncio.sleep(0.002)


def check(got: list[Got], undisturbed: list[Got]) -> None:
    for (endpoint, kind), mine, theirs in zip(STREAMS, got, undisturbed, strict=True):
        where = f"{endpoint.__name__}, {kind}"
        assert mine.usages == theirs.usages, where
        assert mine.finishes == theirs.finishes, where
        assert mine.roles == theirs.roles, where
        assert {index: len(tokens) for index, tokens in mine.tokens.items()} == {
            index: len(tokens) for index, tokens in theirs.tokens.items()
        }, where
        if kind != "sampled without a seed":  # of which each request has its own
            assert mine == theirs, where


async def test_streams_of_every_kind_go_on_at_another_router_when_theirs_is_killed() -> None:
    draws = random.Random()
    async with two_routers() as (cluster, client):
        undisturbed = await all_streams(client, [])
        everything = sum(got.total for got in undisturbed)
        progress: list[Got] = []

        at = draws.randrange(1, everything * 3 // 4)
        print(f"router killed after {at} of {everything} tokens")
        running = asyncio.create_task(all_streams(client, progress))
        await asyncio.sleep(0)
        await until_total(progress, at)
        await cluster.kill_router(0)
        check(await running, undisturbed)
        assert total(cluster.routers[1].http, "twostroke_recovered_requests_total") >= 1, "all was computed again"
        resumed = client.resumptions

        await cluster.start_router(None, 0)
        at = draws.randrange(1, everything // 2)
        print(f"decode worker killed after {at} of {everything} tokens, then the router")
        async with new_client(cluster) as again:
            running = asyncio.create_task(all_streams(again, progress))
            await asyncio.sleep(0)
            await until_total(progress, at)
            await cluster.kill("decode-0")
            await until_total(progress, min(at + everything // 5, everything - 1))
            await cluster.kill_router(0)
            check(await running, undisturbed)
            assert resumed + again.resumptions >= 1


async def test_streams_move_between_routers_that_live_and_leave_one_that_is_told_to_end() -> None:
    async with two_routers(decode=1) as (cluster, client):
        await move_from_router_to_router(cluster)
        await end_the_first_router(cluster, client)


async def move_from_router_to_router(cluster: ProcessCluster) -> None:
    """What is left behind hears so, and harms nobody."""
    clients = [Client(router.grpc) for router in cluster.routers.values()]
    request = generate_request(PROMPT, max_tokens=120, ignore_eos=True, seed=3)
    whole = [token async for message in clients[0].stub.Generate(request) for token in message.token_ids]
    tokens: list[int] = []
    left = []
    for router in (0, 1, 1, 0):
        call = clients[router].stub.Generate(request, timeout=PATIENCE_S)
        left.append(call)
        for _ in range(20):
            message = await call.read()
            assert isinstance(message, inference_pb2.GenerateResponse)
            tokens += message.token_ids
            request.resume_from = message.resume_token
    await refused(cluster, request.resume_from)
    tokens += [token async for message in clients[1].stub.Generate(request) for token in message.token_ids]
    assert tokens == whole
    for call in left:
        with pytest.raises(grpc.aio.AioRpcError, match="continues with this stream"):
            await rest_of(call)
    assert cluster.metric("decode-0", "twostroke_sampled_tokens_total") <= 2 * 120 + 5, "computed again"
    for client in clients:
        await client.close()


async def end_the_first_router(cluster: ProcessCluster, client: ResumingClient) -> None:
    """Under a stream, and under `twostroke chat`, which goes on by itself."""
    long = {"max_tokens": 150, "seed": 3}
    undisturbed = await chat_stream(client, Got(), long)
    sampled = cluster.metric("decode-0", "twostroke_sampled_tokens_total")
    endpoints = ",".join(router.http for router in cluster.routers.values())
    command = [sys.executable, "-m", "tools.cli", "chat", "--http", endpoints, "Tell me everything." * 3]
    chat = await asyncio.create_subprocess_exec(
        *command, "--seed", "3", "--max-tokens", "150", stdout=asyncio.subprocess.PIPE
    )
    assert chat.stdout is not None
    said = await chat.stdout.read(20)
    got = Got()
    running = asyncio.create_task(chat_stream(client, got, long))
    await until_total([got], 5)
    cluster.routers[0].process.send_signal(signal.SIGTERM)
    await cluster.kill_router(0, signal.SIGINT)  # the second signal: it waits for nobody any longer
    assert await running == undisturbed
    assert client.resumptions == 1
    said += await chat.stdout.read()
    assert (await chat.wait(), said.decode()) == (0, undisturbed.texts[0] + "\n")
    assert cluster.metric("decode-0", "twostroke_sampled_tokens_total") - sampled <= 2 * 150 + 5, "computed again"


async def rest_of(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def refused(cluster: ProcessCluster, token: str) -> None:
    """What goes on with nothing is refused, with a word about the field."""
    whole = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "seed": 3}
    for body, header in (
        (whole, token),
        ({**whole, "stream": True}, "no token"),
        ({**whole, "stream": True}, token.replace(":", ":9999", 1)),
        ({**whole, "stream": True, "n": 2}, token),
        ({**whole, "stream": True, "prompt": [1, *PROMPT]}, token),
        ({**whole, "stream": True, "seed": 4}, token),
    ):
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{cluster.http}/v1/completions", json=body, headers={"Last-Event-ID": header}) as answer,
        ):
            assert answer.status == 400, (body, header)
            assert (await answer.json())["error"]["param"] in ("last-event-id", "resume_from")
