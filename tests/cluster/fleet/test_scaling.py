"""A load that doubles: the planner adds the worker that is lacking, takes it away again, and no request notices."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.cluster.elastic import ElasticCluster, elastic_cluster
from tests.cluster.processes import PATIENCE_S, Client, generate_request
from tests.unit.worker.rig import paced, prompt_of
from twostroke.config import CacheConfig, ClusterConfig, ScalingConfig

PROMPT, ANSWER = 240, 8
LOW, HIGH = 2.4, 4.8
"""Requests per second; the first takes 0.48 of a prefill worker, the second 0.96, where three quarters are enough."""
QUICK = ScalingConfig(max_prefill=2, tick_s=0.25, up_s=1.0, down_s=4.0, average_s=2.5)


class Load:
    """Asks at a pace that can be changed, for prompts that nobody has seen."""

    def __init__(self, client: Client, rate: float) -> None:
        self.rate = rate
        self._client = client
        self._asked: list[asyncio.Task[list[int]]] = []

    async def run(self) -> None:
        while True:
            self._asked.append(asyncio.create_task(self._ask(prompt_of(PROMPT, seed=len(self._asked)))))
            await asyncio.sleep(1 / self.rate)

    async def _ask(self, prompt: tuple[int, ...]) -> list[int]:
        """Without a deadline: whoever has none is not refused for being late."""
        request = generate_request(prompt, max_tokens=ANSWER, temperature=0, ignore_eos=True)
        async with asyncio.timeout(PATIENCE_S):
            return [token async for said in self._client.stub.Generate(request) for token in said.token_ids]

    async def answers(self) -> list[list[int]]:
        """All of them; raises what any of them met."""
        return await asyncio.gather(*self._asked)


async def serving(cluster: ElasticCluster, prefill: int) -> dict[str, object]:
    """Waits until as many prefill workers are wanted and serve; what is said of it."""
    await cluster.until(
        lambda workers: (
            sum(each.role == "prefill" and each.observed.stage == "serving" for each in workers.values()) == prefill
            and len(workers) == prefill + 1
        )
    )
    return await cluster.supervisor.scaling()


async def play(pace: ScalingConfig) -> tuple[float, float]:
    """Seconds from the doubling until two prefill workers serve, and from its end until one does."""
    config = ClusterConfig(
        prefill=1,
        decode=1,
        model=paced(prefill_tokens_per_s=1200, step_ms=10),
        cache=CacheConfig(kv_cache_memory_bytes=32 << 20),
        scaling=pace,
    )
    async with elastic_cluster(config) as cluster:
        client = Client(cluster.grpc)
        load = Load(client, LOW)
        asking = asyncio.create_task(load.run())
        await asyncio.sleep(pace.average_s)
        assert (await cluster.supervisor.scaling())["wanted_prefill"] == 1
        load.rate, doubled_s = HIGH, time.monotonic()
        said = await serving(cluster, 2)
        assert "more prefill workers have been needed" in str(said["reason"])
        load.rate, halved_s = LOW, time.monotonic()
        said = await serving(cluster, 1)
        assert "fewer would have been enough" in str(said["reason"])
        back_s = time.monotonic() - halved_s
        asking.cancel()
        answers = await load.answers()
        assert {len(answer) for answer in answers} == {ANSWER}
        await client.close()
    return halved_s - doubled_s, back_s


@pytest.mark.slow
async def test_a_load_that_doubles_gets_a_prefill_worker_and_loses_it_again_without_a_failed_request() -> None:
    await play(QUICK)


@pytest.mark.slow
async def test_it_comes_within_a_minute_as_people_run_it() -> None:
    up_s, down_s = await play(ScalingConfig(max_prefill=2))
    print(f"two prefill workers after {up_s:.1f} s, one again after {down_s:.1f} s")
    assert up_s < 60
