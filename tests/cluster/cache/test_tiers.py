"""Workers that are killed find their pages on disk again: announced, proved equal, and right to the last token."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster.cache.test_index_equality import shown_by_router, until_equal
from tests.cluster.processes import PATIENCE_S, Client, ProcessCluster, running_cluster
from tests.metrics_page import scraped
from twostroke.config import CacheConfig, ModelConfig
from twostroke.kv_cache.tier import Tier

PACED = ModelConfig(model="paced:step_ms=1,prefill_tokens_per_s=4000,page_bytes=4096,max_model_len=2048")
SLOWLY = ModelConfig(model="paced:step_ms=1,prefill_tokens_per_s=200,page_bytes=4096,max_model_len=2048")
"""Computes a block in 80 ms: no disk of a busy machine takes longer for its page."""
PAGES, PROMPTS, BLOCKS = 24, 6, 8
OPTIONS = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.9, "seed": 3}


def prompt(number: int) -> list[int]:
    return [number, *range(16 * BLOCKS + 1)]


def of_worker(cluster: ProcessCluster, worker: str, name: str) -> float:
    lines = scraped(f"http://{cluster.workers[worker].info['metrics_address']}").splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f"twostroke_tier_{name}") and "disk" in line
    )


async def test_killed_workers_serve_from_the_disk_of_their_last_epoch(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=PAGES * 4096, disk_cache_bytes=8 << 20, disk_cache_dir=str(tmp_path))
    async with running_cluster(prefill=1, decode=1, model=PACED, cache=cache) as cluster:
        client = Client(cluster.grpc)

        async def answers() -> list[list[int]]:
            return [await client.tokens(prompt(number), **OPTIONS) for number in range(PROMPTS)]

        expected = await answers()
        load = asyncio.create_task(answers())
        await asyncio.sleep(0.1)
        workers = ("decode-0", "prefill-0")
        await asyncio.gather(*map(cluster.kill, workers))
        await asyncio.gather(*map(cluster.restart, workers))
        assert await load == expected
        held = await until_equal(cluster)
        assert max(held.values()) > PAGES, "more than fits into the pages alone"
        assert await answers() == expected
        loaded = [await asyncio.to_thread(of_worker, cluster, worker, "loaded_pages_total") for worker in held]
        assert sum(loaded) > BLOCKS
        failed = [await asyncio.to_thread(of_worker, cluster, worker, "verification_failures_total") for worker in held]
        assert sum(failed) == 0
        await client.close()


def brought_up(cluster: ProcessCluster, worker: str) -> float:
    """Returns how many pages a worker has read from its tiers for requests, whether they waited or ran."""
    return sum(of_worker(cluster, worker, name) for name in ("loaded_pages_total", "prefetched_pages_total"))


async def test_a_prompt_that_lies_on_one_disk_alone_is_asked_there(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=PAGES * 4096, disk_cache_bytes=8 << 20, disk_cache_dir=str(tmp_path))
    async with running_cluster(prefill=0, decode=2, model=SLOWLY, cache=cache) as cluster:
        client = Client(cluster.grpc)

        async def on_tiers() -> dict[str, frozenset[tuple[Tier, bytes]]]:
            await until_equal(cluster)
            shown = {worker: (await shown_by_router(cluster, worker))[3] for worker in cluster.workers}
            return {worker: frozenset((tier, block) for tier, _, block in parts) for worker, parts in shown.items()}

        await client.tokens(prompt(0), **OPTIONS)
        home, blocks = next((worker, shown) for worker, shown in (await on_tiers()).items() if shown)
        other = next(worker for worker in cluster.workers if worker != home)
        wanted = {block for _, block in blocks}
        for number in range(1, 60):
            shown = (await on_tiers())[home]
            if wanted <= {block for tier, block in shown if tier is Tier.DISK} and not any(
                tier is Tier.DEVICE and block in wanted for tier, block in shown
            ):
                break
            await client.tokens(prompt(number), **OPTIONS)
        else:
            raise AssertionError(f"the first prompt's pages are not on the disk of {home} alone: {shown}")
        before = [await asyncio.to_thread(brought_up, cluster, each) for each in (home, other)]
        cached = [
            each.usage.cached_tokens async for each in client.stream(prompt(0), **OPTIONS) if each.HasField("usage")
        ]
        assert cached == [16 * BLOCKS]
        async with asyncio.timeout(PATIENCE_S):  # a page is counted a moment after it has come
            while await asyncio.to_thread(brought_up, cluster, home) == before[0]:
                await asyncio.sleep(0.05)
        after = [await asyncio.to_thread(brought_up, cluster, each) for each in (home, other)]
        assert [later - earlier for earlier, later in zip(before, after, strict=True)] == [BLOCKS, 0]
        assert not wanted & {block for _, block in (await on_tiers())[other]}, "fetched by the other worker"
        await client.close()
