"""Workers that leave while they are used: nobody notices but by one slow token."""

from __future__ import annotations

import asyncio
import signal

from tests.cluster.lent import forget_cached
from tests.cluster.processes import Client, running_cluster
from tests.unit.worker.rig import BLOCK, paced, prompt_of
from twostroke.config import SPECULATE_OFF, ScheduleConfig

STREAMS, TOKENS = 4, 200
STEP_MS = 10.0
STEADY = ScheduleConfig(speculate=SPECULATE_OFF)
"""A step for each token, also of answers that were given before."""


async def read_all(client: Client, prompts: list[tuple[int, ...]], answers: list[list[int]]) -> list[list[int]]:
    """Fills the answers as their tokens come."""

    async def read(prompt: tuple[int, ...], tokens: list[int]) -> None:
        async for response in client.stream(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, seed=1):
            tokens += response.token_ids

    await asyncio.gather(*map(read, prompts, answers))
    return answers


async def test_streams_move_with_their_pages_off_a_decode_worker_that_is_told_to_end() -> None:
    prompts = [prompt_of(400 + 7 * number, seed=number) for number in range(STREAMS)]
    async with running_cluster(prefill=1, decode=2, model=paced(step_ms=STEP_MS), schedule=STEADY) as cluster:
        client = Client(cluster.grpc)
        expected = await read_all(client, prompts, [[] for _ in prompts])
        await forget_cached(cluster)
        answers: list[list[int]] = [[] for _ in prompts]
        reading = asyncio.create_task(read_all(client, prompts, answers))
        while min(map(len, answers)) < TOKENS // 8:
            await asyncio.sleep(0.01)
        running = {worker_id: (await cluster.load(worker_id)).running for worker_id in ("decode-0", "decode-1")}
        leaving, staying = sorted(running, key=lambda worker_id: -running[worker_id])
        await cluster.kill(leaving, signal.SIGTERM)
        assert await reading == expected
        blocks = cluster.metric(staying, "twostroke_peer_pulled_blocks_total")
        assert blocks >= running[leaving] * (400 // BLOCK), "they were moved with their pages, not waited for"
        await client.close()
