"""Streams that outlive their router: real processes, real kills, the paced model."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.clients.resuming import ResumingClient
from tests.cluster.processes import ProcessCluster, generate_request, running_cluster
from twostroke.config import ModelConfig

MODEL = ModelConfig(model="paced:step_ms=12,prefill_tokens_per_s=20000")
PROMPT = list(range(1000, 1070))
TOKENS = 60
SILENCE_S = 15.0


@dataclass
class Got:
    """Of one stream, by choice."""

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
    async with running_cluster(prefill=1, decode=decode, routers=2, model=MODEL) as cluster:
        doors = cluster.routers.values()
        async with ResumingClient(
            grpc=[door.grpc for door in doors], http=[door.http for door in doors], silence_s=SILENCE_S
        ) as client:
            yield cluster, client


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


STREAMS = [(door, kind) for door in (grpc_stream, chat_stream) for kind in KINDS]


async def all_streams(client: ResumingClient, progress: list[Got], seeds: bool = True) -> list[Got]:
    """One of every kind over each door, at once."""
    del seeds
    progress[:] = [Got() for _ in STREAMS]
    async with asyncio.timeout(60):
        return await asyncio.gather(
            *(door(client, got, KINDS[kind]) for got, (door, kind) in zip(progress, STREAMS, strict=True))
        )


def check(got: list[Got], undisturbed: list[Got]) -> None:
    for (door, kind), mine, theirs in zip(STREAMS, got, undisturbed, strict=True):
        where = f"{door.__name__}, {kind}"
        assert mine.finishes == theirs.finishes, where
        assert all(len(finishes) == 1 for finishes in mine.finishes.values()), where
        assert {index: len(tokens) for index, tokens in mine.tokens.items()} == {
            index: len(tokens) for index, tokens in theirs.tokens.items()
        }, where
        assert mine.usages == theirs.usages, where
        assert len(mine.usages) == 1, where
        assert mine.roles == theirs.roles, where
        if kind != "sampled without a seed":  # of which each request has its own
            assert mine == theirs, where


async def test_streams_of_every_kind_go_on_at_another_router_when_theirs_is_killed() -> None:
    draws = random.Random(11)
    async with two_routers() as (cluster, client):
        undisturbed = await all_streams(client, [])
        for kill in range(2):
            progress: list[Got] = []
            running = asyncio.create_task(all_streams(client, progress))
            await asyncio.sleep(0)
            at = draws.randrange(1, 10 * TOKENS)
            while sum(got.total for got in progress) < at:
                await asyncio.sleep(0.002)
            victim = client._preferred
            await cluster.kill_router(victim)
            check(await running, undisturbed)
            if kill == 0:
                await cluster.start_router(None, victim)
                break
        assert client.resumptions >= len(STREAMS) / 2
