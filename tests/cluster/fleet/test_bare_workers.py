"""The trunk alone: workers with empty tables of branches serve, split, and survive a killed decode worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from tests.cluster.processes import Client, running_cluster
from tests.cluster.requests.deaths import asked_until, kill_the_busiest
from tests.lora import random_tensors, write_adapter
from tests.metrics_page import total
from twostroke.config import CacheConfig, ModelConfig
from twostroke.models.adapters.peft import read_adapter

PACED = ModelConfig(model="paced:step_ms=8,prefill_tokens_per_s=20000,page_bytes=4096,max_model_len=2048")
POOL = CacheConfig(kv_cache_memory_bytes=4 << 20)
BARE = "tests.cluster.bare_worker"
SAMPLED = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9, "seed": 3}
PROMPTS = [[number + 1] * 400 for number in range(6)]


async def answers(client: Client) -> list[list[int]]:
    return await asyncio.gather(*(client.tokens(prompt, **SAMPLED) for prompt in PROMPTS))


async def test_the_trunk_alone_serves_splits_and_survives_a_killed_decode_worker() -> None:
    async with running_cluster(prefill=0, decode=1, model=PACED, cache=POOL) as whole:
        client = Client(whole.grpc)
        expected = await answers(client)
        await client.close()
    async with running_cluster(
        prefill=1, decode=2, model=PACED, cache=POOL, prefill_module=BARE, decode_module=BARE
    ) as cluster:
        client = Client(cluster.grpc)
        is_killed, living = asyncio.Event(), {"decode-0", "decode-1"}
        asked = asyncio.ensure_future(asked_until(is_killed, lambda: answers(client)))
        await kill_the_busiest(cluster, living, 20, asked)
        is_killed.set()
        assert all(came == expected for came in await asked)
        assert total(cluster.http, "twostroke_reopened_requests_total") > 0
        assert cluster.metric("prefill-0", "twostroke_served_pages_total") > 0, "prompts were split"
        assert cluster.metric(*living, "twostroke_sampled_tokens_total") > 0
        await client.close()


async def test_what_asks_for_a_branch_is_refused_by_name(tmp_path: Path) -> None:
    branches: dict[str, dict[str, object]] = {
        "prompt_logprobs: ": {"prompt_logprobs": 1},
        "speculation: ": {"speculation": "lookup"},
        "weights: ": {"model": "fine-tune"},
    }
    write_adapter(tmp_path, tensors=random_tensors(seed=1))
    async with running_cluster(
        prefill=1, decode=1, model=PACED, cache=POOL, prefill_module=BARE, decode_module=BARE
    ) as cluster:
        await cluster.name_adapter("fine-tune", read_adapter(tmp_path), tmp_path)
        client = Client(cluster.grpc)
        for says, options in branches.items():
            with pytest.raises(grpc.aio.AioRpcError, match=says) as refused:
                await client.tokens(PROMPTS[0], **SAMPLED | options)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await client.tokens(PROMPTS[0], **SAMPLED), "others are served on"
        await client.close()
