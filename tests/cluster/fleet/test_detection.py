"""A worker that is merely slow is not declared dead; one that is frozen is, and is a member again when it thaws."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.cluster.processes import PATIENCE_S, Client, ProcessCluster, running_cluster
from tests.metrics_page import total
from twostroke.config import SPECULATE_OFF, CacheConfig, ModelConfig, PatienceConfig, ScheduleConfig

MODEL = ModelConfig(
    model="paced:prefill_tokens_per_s=4000,step_ms=10,step_us_per_seq=0,vocab=2048,page_bytes=16384,max_model_len=4096"
)
BURST_S = 0.3
"""Frozen for so long, running for as long, and so on: half the CPU that it needs."""
PROMPTS = [[7 * number + position for position in range(50)] for number in range(6)]


async def starve(cluster: ProcessCluster, worker: str, seconds: float) -> None:
    process, until_s = cluster.workers[worker].process, time.monotonic() + seconds
    while time.monotonic() < until_s:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(BURST_S)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(BURST_S)


def counted(cluster: ProcessCluster, name: str, **labels: str) -> float:
    return total(cluster.http, f"twostroke_{name}_total", **labels)


def ask_all(client: Client) -> asyncio.Future[list[list[int]]]:
    return asyncio.gather(*(client.tokens(prompt, max_tokens=150, ignore_eos=True, seed=1) for prompt in PROMPTS))


async def test_a_starved_worker_serves_on_and_a_frozen_one_is_replaced_until_it_thaws() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=1024 * 16384)
    steady = ScheduleConfig(speculate=SPECULATE_OFF)  # the same answers take as long again
    async with running_cluster(
        prefill=0, decode=2, model=MODEL, cache=cache, schedule=steady, policy="round-robin"
    ) as cluster:
        client = Client(cluster.grpc)
        answers = ask_all(client)
        await starve(cluster, "decode-0", 1.2 * PatienceConfig().dead_after_s)
        expected = await answers
        assert counted(cluster, "worker_judgements", worker="decode-0", liveness="dead") == 0
        assert counted(cluster, "reopened_requests") == 0
        answers = ask_all(client)
        await asyncio.sleep(BURST_S)
        cluster.workers["decode-0"].process.send_signal(signal.SIGSTOP)
        assert await answers == expected
        assert counted(cluster, "worker_judgements", worker="decode-0", liveness="dead", cause="silence") == 1
        assert counted(cluster, "reopened_requests") > 0
        alive = counted(cluster, "worker_judgements", worker="decode-0", liveness="alive")
        cluster.workers["decode-0"].process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            while counted(cluster, "worker_judgements", worker="decode-0", liveness="alive") == alive:
                await asyncio.sleep(0.05)
        await client.close()
