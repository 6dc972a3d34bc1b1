"""The router's index equals every worker's caches soon after quiet, though events get lost and processes die."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable

import grpc.aio
import pytest

from tests.cluster.processes import TOKEN, Client, ProcessCluster, running_cluster
from tests.metrics_page import scraped
from tests.trials.chaos.injection import event_faults, injector, plan
from twostroke.config import CacheConfig, ModelConfig
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.events import batch_from_message
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

PACED = ModelConfig(model="paced:step_ms=1,prefill_tokens_per_s=200000,page_bytes=1024,max_model_len=2048")
POOL = CacheConfig(kv_cache_memory_bytes=100 << 10)
"""A hundred pages: most of what is asked for is evicted again."""
FAULTS = "drop:0.01,duplicate:0.01,reorder:0.01,seed:2"
"""With this seed each kind of fault comes among the first fifty batches of some stream."""
PATIENCE_S = 60.0
"""Many times what it takes."""


async def test_the_index_equals_every_workers_caches_soon_after_the_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plan.ENVIRONMENT, injector.BY_CALL)
    monkeypatch.setenv(event_faults.ENVIRONMENT, FAULTS)
    async with running_cluster(prefill=2, decode=2, model=PACED, cache=POOL) as cluster:
        load = asyncio.create_task(ask_many(cluster, seeds=range(80)))
        await asyncio.sleep(0.5)
        await cluster.kill("decode-1")
        await cluster.restart("decode-1")
        await load
        load = asyncio.create_task(ask_many(cluster, seeds=range(80, 120)))
        await asyncio.sleep(0.2)
        await cluster.restart_router()
        await load
        await ask_many(cluster, seeds=range(120, 200))
        quiet_at_s = time.monotonic()
        for worker in cluster.workers:
            while (shown := await shown_by_router(cluster, worker)) != (
                truth := await shown_by_worker(cluster, worker)
            ):
                assert time.monotonic() < quiet_at_s + PATIENCE_S, f"{worker}: {shown[1:3]} is not {truth[1:3]}"
                await asyncio.sleep(0.02)
            assert len(truth[3]) == truth[1] > 0, worker
        print(f"index equal to all workers {time.monotonic() - quiet_at_s:.2f} s after the last answer")
        lines = scraped(cluster.http).splitlines()
        counted = [line for line in lines if line.startswith("twostroke_event_") and not line.endswith(" 0.0")]
        for trouble in ("gaps", "repeats"):
            assert any(line.startswith(f"twostroke_event_{trouble}_total") for line in counted), counted
        assert not any(line.startswith("twostroke_event_divergences_total") for line in counted), counted


async def until_equal(cluster: ProcessCluster) -> dict[str, int]:
    """Blocks that each worker holds."""
    held: dict[str, int] = {}
    async with asyncio.timeout(PATIENCE_S):
        for worker in cluster.workers:
            while (truth := await shown_by_worker(cluster, worker)) != await shown_by_router(cluster, worker):
                await asyncio.sleep(0.02)
            held[worker] = len(truth[3])
            assert held[worker] == truth[1]
    return held


async def ask_many(cluster: ProcessCluster, seeds: Iterable[int]) -> None:
    """Prompts with common beginnings, a few at a time. Answers of a router that dies meanwhile are lost."""
    client, at_once = Client(cluster.grpc), asyncio.Semaphore(8)

    async def ask(seed: int) -> None:
        draws = random.Random(seed)
        group = draws.randrange(12)
        prompt = [group + 1] * 16 * draws.randint(1, 20) + [draws.randrange(200) for _ in range(40)]
        async with at_once:
            try:
                assert len(await client.tokens(prompt, max_tokens=20, ignore_eos=True)) == 20
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise

    try:
        await asyncio.gather(*map(ask, seeds))
    finally:
        await client.close()


Shown = tuple[str, int, bytes, frozenset[tuple[Tier, GroupKind, bytes]]]
"""Epoch, size and digest as said, and the blocks on each tier."""


async def shown_by_worker(cluster: ProcessCluster, worker: str) -> Shown:
    return await snapshot_from(str(cluster.workers[worker].info["address"]), worker)


async def shown_by_router(cluster: ProcessCluster, worker: str) -> Shown:
    return await snapshot_from(cluster.admin, worker)


async def snapshot_from(address: str, worker: str) -> Shown:
    channel = PeerChannel(address, TOKEN)
    try:
        call = control_pb2_grpc.ControlStub(channel.channel).SubscribeKvEvents(
            control_pb2.SubscribeKvEventsRequest(worker_id=worker), metadata=channel.metadata, timeout=PATIENCE_S
        )
        message = await call.read()
        call.cancel()
        assert isinstance(message, control_pb2.KvEventBatch)
        assert message.snapshot
        batch = batch_from_message(message)
        blocks = frozenset((*change.place, block) for change in batch.changes for block in change.stored)
        return message.epoch, batch.block_count, batch.digest, blocks
    finally:
        await channel.close()
