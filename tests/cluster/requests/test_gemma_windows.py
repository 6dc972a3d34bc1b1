"""Gemma 3 270M, whose layers mostly have a window of 512 tokens: what its pools hold, and what the router foresees."""

from __future__ import annotations

import json
import random
from pathlib import Path

import grpc.aio
import pytest

from tests.cluster.cache.test_index_equality import until_equal
from tests.cluster.processes import SHOWN, Client, ProcessCluster, running_cluster
from tests.metrics_page import scraped
from twostroke.config import CacheConfig, ModelConfig
from twostroke.models.catalog.fetch import fetch
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

pytestmark = pytest.mark.slow
MODEL = ModelConfig(model="gemma3-270m", max_model_len=4096)
REQUESTS = 300


def gemma_dir() -> Path:
    return fetch(MODEL.model, MODEL.dtype, lambda stage, part: None)


async def model_info(cluster: ProcessCluster) -> control_pb2.ModelInfo:
    async with grpc.aio.insecure_channel(cluster.admin) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        return await control.GetModelInfo(control_pb2.GetModelInfoRequest(), metadata=SHOWN)


def in_use(cluster: ProcessCluster, worker: str) -> tuple[int, int]:
    """Pages and window parts that the worker's requests hold."""
    lines = scraped(str(cluster.workers[worker].info["metrics_address"])).splitlines()
    counts = [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and 'state="active"' in line)
        for name in ("twostroke_pages", "twostroke_further_pages")
    ]
    return int(counts[0]), int(counts[1])


async def test_a_request_of_2000_tokens_takes_less_than_half_of_what_it_would_without_windows() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=256 << 20)
    async with running_cluster(prefill=1, decode=1, model=MODEL, model_dir=gemma_dir(), cache=cache) as cluster:
        client = Client(cluster.grpc)
        told = await model_info(cluster)
        stream = client.stream(list(range(1000, 3000)), max_tokens=400, temperature=0, ignore_eos=True)
        await anext(stream)
        pages, parts = in_use(cluster, "decode-0")
        taken_bytes = pages * told.page_bytes + parts * told.further_page_bytes
        whole_bytes = pages * (told.page_bytes + told.further_page_bytes)
        async for _ in stream:
            pass
        await client.close()
    print(f"{pages} pages and {parts} window parts: {taken_bytes} bytes, {whole_bytes / taken_bytes:.2f} times fewer")
    assert pages >= 125
    assert whole_bytes >= 2 * taken_bytes


def prompt_of(seed: int) -> list[int]:
    """A prompt that begins like one in six others, many of them longer than the window."""
    draws = random.Random(seed)
    group = draws.randrange(6)
    shared = random.Random(group).choices(range(1000, 9000), k=768)
    return shared[: 16 * draws.randint(4, 48)] + draws.choices(range(1000, 9000), k=draws.randint(1, 50))


@pytest.mark.timeout(3600)
async def test_every_hit_of_300_requests_is_the_one_that_the_router_predicted(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    cache = CacheConfig(kv_cache_memory_bytes=96 << 20)  # about five prompts: the rest is evicted again
    async with running_cluster(
        prefill=1, decode=1, model=MODEL, model_dir=gemma_dir(), cache=cache, request_log=log
    ) as cluster:
        client = Client(cluster.grpc)
        for seed in range(REQUESTS):
            await client.tokens(prompt_of(seed), max_tokens=2, temperature=0, ignore_eos=True)
            await until_equal(cluster)  # events of this answer have come
        await client.close()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    found = [(each["predicted_cached_tokens"], each["cached_tokens"]) for each in records if each["record"] == "answer"]
    hits, pulls = sum(cached > 0 for _, cached in found), sum(bool(each.get("source")) for each in records)
    print(f"{hits} of {len(found)} requests had a hit, {pulls} pulled")
    assert len(found) == REQUESTS
    assert [pair for pair in found if pair[0] != pair[1]] == []
    assert hits > REQUESTS / 5
