"""Workers that are killed find their pages on disk again: announced, proved equal, and right to the last token."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.cluster.test_index_equality import until_equal
from tests.metrics_page import scraped
from twostroke.config import CacheConfig, ModelConfig

PACED = ModelConfig(model="paced:step_ms=1,prefill_tokens_per_s=4000,page_bytes=4096,max_model_len=2048")
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
