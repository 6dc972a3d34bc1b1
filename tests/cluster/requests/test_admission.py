"""A flood in front of real processes: another tenant passes it, and late requests are refused by prediction."""

from __future__ import annotations

import asyncio
import statistics
import time

import grpc
import grpc.aio
import pytest

from tests.cluster.processes import PATIENCE_S, Client, generate_request, running_cluster
from twostroke.config import ModelConfig

PACED = ModelConfig(model="paced:step_ms=1,max_model_len=2048", served_model_name="tiny")
WARM = 4
"""Requests from which the worker learns its costs: one alone may have been held up."""
FLOOD = 45
PROMPT_TOKENS = 1600
DEADLINE_S = 2.0
"""The flood holds the only worker for twice as long at least. An idle second one would rightly take the late one."""


async def test_a_flood_delays_its_own_tenant_and_late_requests_are_refused_by_prediction() -> None:
    async with running_cluster(prefill=0, decode=1, model=PACED) as cluster:
        client = Client(cluster.grpc)
        for number in range(WARM):
            await first_token_s(client, 2001 + number, "warm")
        flood = [asyncio.create_task(first_token_s(client, number, "flood")) for number in range(1, FLOOD + 1)]
        await asyncio.sleep(0.5)
        singles = [await first_token_s(client, 1000 + number, "single") for number in range(3)]
        assert sum(task.done() for task in flood) < FLOOD / 2, "the flood should still be there"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await first_token_s(client, 2000, "single", priority=-1, timeout_s=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "before its deadline"
        retry_after_ms = dict(refused.value.trailing_metadata() or ())["retry-after-ms"]
        assert int(retry_after_ms) > 0
        async with asyncio.timeout(PATIENCE_S):
            flooded = await asyncio.gather(*flood)
        assert max(singles) < statistics.median(flooded) / 2
        await client.close()
        await cluster.assert_quiet()


async def first_token_s(
    client: Client, number: int, tenant: str, *, priority: int = 0, timeout_s: float | None = None
) -> float:
    """Prompts have no block in common."""
    begun_s = time.monotonic()
    came_s = 0.0
    prompt = [(number * 7919 + position) % 30_000 for position in range(PROMPT_TOKENS)]
    request = generate_request(prompt, tenant=tenant, priority=priority, max_tokens=2)
    async for _ in client.stub.Generate(request, timeout=timeout_s):
        came_s = came_s or time.monotonic() - begun_s
    return came_s
