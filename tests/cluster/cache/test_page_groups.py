"""Layers with a window keep their parts of blocks apart: real processes, a paced model whose tokens depend on both."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.cluster.cache.test_index_equality import until_equal
from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.metrics_page import scraped
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig

WINDOW, PAGE_BYTES, PART_BYTES = 64, 1024, 4096
MODEL = ModelConfig(
    model=f"paced:step_ms=1,prefill_tokens_per_s=200000,page_bytes={PAGE_BYTES},window={WINDOW},"
    f"window_page_bytes={PART_BYTES},max_model_len=2048"
)
SMALL = CacheConfig(kv_cache_memory_bytes=400 << 10)
"""Most of what is asked for is evicted again, window parts before pages."""
LARGE = CacheConfig(kv_cache_memory_bytes=4 << 20)


SLOW = MODEL.replace(model=MODEL.model.replace("prefill_tokens_per_s=200000", "prefill_tokens_per_s=1500"))
"""It computes a block in 11 ms, so that every load pays."""


def loaded_from(cluster: ProcessCluster, tier: str) -> float:
    """Pages and window parts that workers have loaded from a tier."""
    pages = [scraped(f"http://{each.info['metrics_address']}") for each in cluster.workers.values()]
    lines, name = "".join(pages).splitlines(), "twostroke_tier_loaded_pages_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and f'tier="{tier}"' in line)


def prompt_of(seed: int, longest: int = 40) -> list[int]:
    """A prompt that begins like one in six others."""
    draws = random.Random(seed)
    group = draws.randrange(6)
    return [group + 1] * 16 * draws.randint(1, longest) + [draws.randrange(200) for _ in range(draws.randint(1, 60))]


async def answers(client: Client, seeds: range, at_once: int = 4) -> list[list[int]]:
    limit = asyncio.Semaphore(at_once)

    async def ask(seed: int) -> list[int]:
        async with limit:
            return await client.tokens(prompt_of(seed), max_tokens=24, temperature=0, ignore_eos=True)

    return list(await asyncio.gather(*map(ask, seeds)))


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """The answers of one worker with room for everything, to 24 prompts."""

    async def alone() -> list[list[int]]:
        async with running_cluster(prefill=0, decode=1, model=MODEL, cache=LARGE) as cluster:
            client = Client(cluster.grpc)
            found = await answers(client, range(24))
            await client.close()
            return found

    return asyncio.run(alone())


async def test_every_hit_is_the_one_that_the_router_predicted(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    pulling = ScheduleConfig(local_prefill=False)
    async with running_cluster(
        prefill=2, decode=2, model=MODEL, cache=SMALL, schedule=pulling, request_log=log
    ) as cluster:
        client = Client(cluster.grpc)
        for seed in range(32):
            await answers(client, range(seed, seed + 1))
            await until_equal(cluster)  # events of the last answer have come
        await client.close()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    found = [each for each in records if each["record"] == "answer"]
    assert len(found) == 32
    assert [each for each in found if each["predicted_cached_tokens"] != each["cached_tokens"]] == []
    assert sum(each["cached_tokens"] > 0 for each in found) > 2
    assert any(each.get("source") for each in records), "nothing was pulled"


@pytest.mark.slow
async def test_hits_on_lower_tiers_are_those_that_the_router_predicted(tmp_path: Path, right: list[list[int]]) -> None:
    seeds, log = range(24), tmp_path / "requests.jsonl"
    cache = SMALL.replace(host_cache_bytes=200 << 10, disk_cache_bytes=32 << 20, disk_cache_dir=str(tmp_path / "pages"))
    async with running_cluster(prefill=1, decode=2, model=SLOW, cache=cache, request_log=log) as cluster:
        client = Client(cluster.grpc)
        found = []
        for seed in seeds:
            found += await answers(client, range(seed, seed + 1))
            await until_equal(cluster)  # events of the last answer, and of what was written to disk, have come
        assert found == right[: len(seeds)]
        await asyncio.gather(*map(cluster.kill, ("decode-0", "prefill-0")))
        await asyncio.gather(*map(cluster.restart, ("decode-0", "prefill-0")))
        assert await answers(client, seeds) == found
        loaded = {tier: loaded_from(cluster, tier) for tier in ("host", "disk")}
        await client.close()
    records = [record for line in log.read_text().splitlines() if (record := json.loads(line))["record"] == "answer"]
    assert len(records) == 2 * len(seeds)
    assert [each for each in records[: len(seeds)] if each["predicted_cached_tokens"] != each["cached_tokens"]] == []
    assert min(loaded.values()) > 0, loaded


async def test_tokens_are_the_same_pulled_warm_preempted_and_after_a_decode_workers_death(
    right: list[list[int]],
) -> None:
    seeds, expected = range(24), right
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=100)  # chunks end within blocks
    async with running_cluster(
        prefill=1, decode=2, model=MODEL, cache=SMALL, schedule=schedule, policy="round-robin"
    ) as cluster:
        client = Client(cluster.grpc)
        assert await answers(client, seeds) == expected
        assert await answers(client, seeds) == expected
        asked = asyncio.ensure_future(answers(client, seeds))
        await asyncio.sleep(0.2)
        await cluster.kill("decode-1")
        assert await asked == expected
        assert cluster.metric("decode-0", "twostroke_pull_bytes_total") > 0
        await client.close()


@pytest.mark.slow
async def test_growing_answers_preempt_one_another_for_window_parts_too() -> None:
    prompts = [[token] * 20 for token in range(1, 7)]

    async def ask(cache: CacheConfig) -> tuple[list[list[int]], float]:
        async with running_cluster(prefill=0, decode=1, model=MODEL, cache=cache) as cluster:
            client = Client(cluster.grpc)
            found = await asyncio.gather(
                *(client.tokens(each, max_tokens=300, temperature=0, ignore_eos=True) for each in prompts)
            )
            await client.close()
            return found, cluster.metric("decode-0", "twostroke_preemptions_total")

    tight = CacheConfig(kv_cache_memory_bytes=260 << 10)
    (expected, none), (found, some) = await ask(LARGE), await ask(tight)
    assert found == expected
    assert none == 0 < some


async def test_a_pull_moves_pages_of_all_blocks_and_window_parts_of_the_last_ones() -> None:
    async with running_cluster(prefill=1, decode=1, model=MODEL, cache=LARGE, policy="round-robin") as cluster:
        client = Client(cluster.grpc)
        blocks, before = 100, 0.0
        while not before:  # the router knows both workers by then
            await client.tokens([7] * 20, max_tokens=1)
            before = cluster.metric("decode-0", "twostroke_pull_bytes_total")
        before = cluster.metric("decode-0", "twostroke_pull_bytes_total")
        await client.tokens([9] * (16 * blocks + 3), max_tokens=2, ignore_eos=True)
        moved = cluster.metric("decode-0", "twostroke_pull_bytes_total") - before
        assert moved == blocks * PAGE_BYTES + WINDOW // 16 * PART_BYTES
        await client.close()
