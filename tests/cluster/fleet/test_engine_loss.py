"""Workers whose engine fails, or whose device dies: they end and are replaced, and no client notices."""

from __future__ import annotations

import asyncio

from tests.cluster.processes import PATIENCE_S, Client, ProcessCluster, running_cluster
from tests.metrics_page import total
from twostroke.config import CacheConfig, ModelConfig, Role
from twostroke.rpc.v1 import control_pb2
from twostroke.worker.process import ENGINE_LOST

PACED = ModelConfig(model="paced:step_ms=4,prefill_tokens_per_s=50000,page_bytes=4096,max_model_len=2048")
POOL = CacheConfig(kv_cache_memory_bytes=4 << 20)
BROKEN = ("decode-raises", "decode-device")


async def replaced(cluster: ProcessCluster, worker_id: str) -> int:
    """What a supervisor does: the status with which the worker ended; another one serves."""
    worker = cluster.workers[worker_id]
    status = await worker.process.wait()
    worker.state = control_pb2.WORKER_STATE_DEAD
    cluster.publish()
    await cluster.restart(worker_id)
    return status


async def test_workers_that_lose_their_engines_are_replaced_and_every_stream_is_whole() -> None:
    async with running_cluster(prefill=1, decode=1, model=PACED, cache=POOL, policy="round-robin") as cluster:
        for worker_id in BROKEN:
            await cluster.start_worker(Role.DECODE, worker_id, 1, module="tests.cluster.broken_worker")
        replacing = [asyncio.create_task(replaced(cluster, worker_id)) for worker_id in BROKEN]
        client = Client(cluster.grpc)
        sent = 0

        async def answers(first: int) -> list[list[int]]:
            options = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": 3}
            prompts = [[first + number] * 40 for number in range(12)]
            return await asyncio.gather(*(client.tokens(prompt, **options) for prompt in prompts))

        came: list[list[int]] = []
        async with asyncio.timeout(PATIENCE_S):
            while not all(task.done() for task in replacing):
                came += await answers(sent)
                sent += 12
        assert [task.result() for task in replacing] == [ENGINE_LOST] * len(BROKEN)
        assert total(cluster.http, "twostroke_engines_lost_total") == len(BROKEN)
        expected = [tokens for first in range(0, sent, 12) for tokens in await answers(first)]
        assert came == expected, "as an engine that never fails answers"
        await client.close()
