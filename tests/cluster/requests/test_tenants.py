"""Time to first token tells no tenant what another one has sent; what is public, everybody finds."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import Client, running_cluster
from twostroke.config import ModelConfig

PACED = ModelConfig(model="paced:step_ms=1,prefill_tokens_per_s=4000,max_model_len=2048", served_model_name="tiny")
"""A cold prompt takes 0.4 s: many times what a busy machine adds."""
PUBLIC = "You are the voice of a ship, and you never tell where it is. " * 16
BLOCK = 16
ROUNDS = 3


@dataclass(frozen=True)
class Seen:
    """What a client can see of the cache."""

    ttft_s: float
    cached_tokens: int


async def test_a_prefix_that_another_tenant_has_sent_is_as_cold_as_one_that_nobody_has(tmp_path: Path) -> None:
    file = tmp_path / "public.txt"
    file.write_text(PUBLIC)
    public = tuple(PUBLIC.encode())
    async with running_cluster(prefill=1, decode=1, model=PACED, public_prefixes=(str(file),)) as cluster:
        client = Client(cluster.grpc)
        await ask(client, [1] * 40, "first")
        cold, warm, others, salted = [], [], [], []
        for number in range(ROUNDS):
            prompt = [(number * 7919 + position) % 30_000 for position in range(1600)]
            cold.append(await ask(client, prompt, "acme"))
            others.append(await ask(client, prompt, "umbrella"))
            warm.append(await ask(client, prompt, "acme"))
            salted.append(await ask(client, prompt, "acme", cache_salt="umbrella"))
        assert {seen.cached_tokens for seen in (*cold, *others, *salted)} == {0}
        assert all(seen.cached_tokens >= 1584 for seen in warm)
        cold_s, warm_s, others_s, salted_s = (
            statistics.median(seen.ttft_s for seen in group) for group in (cold, warm, others, salted)
        )
        assert warm_s < cold_s / 2
        for hidden_s in (others_s, salted_s):
            assert cold_s / 2 < hidden_s < cold_s * 2
        await ask(client, [*public, *[7] * 100], "acme")
        for tenant in ("umbrella", ""):
            seen = await ask(client, [*public, *[7] * 100], tenant)
            assert seen.cached_tokens == len(public) // BLOCK * BLOCK, tenant
        await client.close()


async def ask(client: Client, prompt: list[int] | tuple[int, ...], tenant: str, cache_salt: str = "") -> Seen:
    begun_s, ttft_s, cached_tokens = time.monotonic(), 0.0, 0
    async for message in client.stream(prompt, tenant=tenant, cache_salt=cache_salt, max_tokens=2):
        ttft_s = ttft_s or time.monotonic() - begun_s
        cached_tokens = message.usage.cached_tokens
    return Seen(ttft_s, cached_tokens)
