"""Workers become the other role while they are used: in their process, and nobody loses a token."""

from __future__ import annotations

import asyncio
import time

from tests.cluster.elastic import elastic_cluster
from tests.cluster.processes import Client
from tests.unit.worker.rig import expected_tokens, paced, prompt_of
from twostroke.config import CacheConfig, ClusterConfig, ModelConfig, ScalingConfig

STREAMS, TOKENS = 4, 100
STEP_MS = 12.0


async def read_all(client: Client, prompts: list[tuple[int, ...]], answers: list[list[int]]) -> list[list[int]]:
    """Fills the answers as their tokens come."""

    async def read(prompt: tuple[int, ...], tokens: list[int]) -> None:
        async for response in client.stream(prompt, max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=1):
            tokens += response.token_ids

    await asyncio.gather(*map(read, prompts, answers))
    return answers


def flexible(prefill: int, decode: int, model: ModelConfig | None = None, **scaling: object) -> ClusterConfig:
    return ClusterConfig(
        prefill=prefill,
        decode=decode,
        model=model or paced(step_ms=STEP_MS),
        cache=CacheConfig(kv_cache_memory_bytes=32 << 20),
        scaling=ScalingConfig(flexible=True, **scaling),  # type: ignore[arg-type]  # any field
    )


async def test_a_decode_worker_becomes_a_prefill_worker_and_back_while_it_is_used() -> None:
    prompts = [prompt_of(200 + 7 * number, seed=number) for number in range(STREAMS)]
    async with elastic_cluster(flexible(1, 2)) as cluster:
        client = Client(cluster.grpc)
        expected = [expected_tokens(prompt, TOKENS) for prompt in prompts]
        pids = {name: worker.pid for name, worker in cluster.backend.workers.items()}
        for worker_id, role in (("decode-1", "prefill"), ("prefill-0", "decode"), ("decode-1", "decode")):
            answers: list[list[int]] = [[] for _ in prompts]
            reading = asyncio.create_task(read_all(client, prompts, answers))
            while min(map(len, answers)) < TOKENS // 4:
                await asyncio.sleep(0.01)
            begun_s = time.monotonic()
            await cluster.supervisor.assign_role(worker_id, role)
            print(f"{worker_id} to {role}: {time.monotonic() - begun_s:.2f} s")
            assert await reading == expected
            assert (await cluster.workers())[worker_id].role == role
        assert {name: worker.pid for name, worker in cluster.backend.workers.items()} == pids, "no process began anew"
        await client.close()
