"""Real processes, the real model in float32: the same tokens as transformers, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.cluster.reference import NEW_TOKENS, Reference, mismatches, references
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig

MODEL = ModelConfig(dtype="float32")
PAGE_BYTES = 737_280
"""Of a 16-token page of the default model in float32."""


@pytest.fixture(scope="module")
def expected(smollm2_dir: Path) -> list[Reference]:
    found = references(smollm2_dir)
    assert len(found) >= 30
    return found


@asynccontextmanager
async def real_cluster(
    smollm2_dir: Path, prefill: int, decode: int, pages: int = 400, policy: str = "kv", **schedule: int
) -> AsyncIterator[tuple[ProcessCluster, Client]]:
    async with running_cluster(
        prefill=prefill,
        decode=decode,
        model=MODEL,
        model_dir=smollm2_dir,
        cache=CacheConfig(kv_cache_memory_bytes=pages * PAGE_BYTES),
        schedule=ScheduleConfig(**schedule),
        policy=policy,
    ) as cluster:
        client = Client(cluster.grpc)
        yield cluster, client
        await client.close()


async def answers_of(client: Client, expected: list[Reference]) -> dict[str, list[int]]:
    async def ask(reference: Reference) -> list[int]:
        return await client.tokens(reference.prompt, max_tokens=NEW_TOKENS, temperature=0)

    answers = await asyncio.gather(*map(ask, expected))
    return {reference.name: answer for reference, answer in zip(expected, answers, strict=True)}


async def test_split_and_then_warm_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    async with real_cluster(smollm2_dir, 1, 1) as (cluster, client):
        assert mismatches(expected, await answers_of(client, expected)) == []
        pulled = cluster.metric("decode-0", "twostroke_pull_bytes_total")
        assert pulled > 0, "nothing was pulled: this was not a split run"
        hits = cluster.metric("decode-0", "twostroke_prefix_cache_hits_total")
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert cluster.metric("decode-0", "twostroke_prefix_cache_hits_total") > hits + 1000


async def test_prompts_of_a_burst_that_are_taken_over_have_the_tokens_of_transformers(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    """A policy that always names the prefill worker; with short chunks its queue is long from the first moment on."""
    longest = sorted(expected, key=lambda each: -len(each.prompt))[:4]
    chunks = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    async with real_cluster(smollm2_dir, 1, 1, policy="round-robin", **chunks) as (cluster, client):
        token = 500
        while cluster.metric("decode-0", "twostroke_pull_bytes_total") == 0:  # the router knows both workers by then
            token += 1
            await client.tokens([token] * 20, max_tokens=1)
        assert mismatches(longest, await answers_of(client, longest)) == []
        assert 1 <= cluster.metric("decode-0", "twostroke_takeovers_total") <= 3
        assert cluster.metric("decode-0", "twostroke_pull_failures_total") == 0


async def test_colocated_in_odd_chunks_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    async with real_cluster(smollm2_dir, 0, 1, max_num_batched_tokens=149) as (_, client):
        assert mismatches(expected, await answers_of(client, expected)) == []


async def test_after_preemption_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    """Three growing answers (3 x 34 pages) do not fit the pool of 98 together, whatever the others do."""
    async with real_cluster(smollm2_dir, 1, 1, pages=98) as (cluster, client):
        growing = [
            asyncio.ensure_future(client.tokens([token], max_tokens=540, temperature=0, ignore_eos=True))
            for token in (504, 1780, 2683)
        ]
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert [len(answer) for answer in await asyncio.gather(*growing)] == [540] * 3
        assert cluster.metric("decode-0", "twostroke_preemptions_total") > 0


async def test_after_the_prefill_worker_is_killed_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    async with real_cluster(smollm2_dir, 1, 1) as (cluster, client):
        asked = asyncio.ensure_future(answers_of(client, expected))
        while cluster.metric("decode-0", "twostroke_pull_bytes_total") == 0:
            await asyncio.sleep(0.02)
        await cluster.kill("prefill-0")
        assert mismatches(expected, await asked) == []
        assert cluster.metric("decode-0", "twostroke_pull_failures_total") > 0


async def test_after_a_decode_worker_is_killed_mid_stream_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    async with real_cluster(smollm2_dir, 2, 2) as (cluster, client):
        asked = asyncio.ensure_future(answers_of(client, expected))
        while cluster.metric("decode-0", "twostroke_sampled_tokens_total") < 20:
            await asyncio.sleep(0.02)
        await cluster.kill("decode-0")
        assert mismatches(expected, await asked) == []
        await cluster.restart("decode-0")
        assert mismatches(expected, await answers_of(client, expected)) == []
