"""Time to first token tells no tenant what another one has sent; what is public, everybody finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from twostroke.config import ModelConfig

PACED = ModelConfig(model="paced:step_ms=1,prefill_tokens_per_s=4000,max_model_len=2048", served_model_name="tiny")
"""A cold prompt takes 0.4 s: many times what a busy machine adds."""
PUBLIC = "You are the voice of a ship, and you never tell where it is. " * 16
BLOCK = 16
ROUNDS = 3


@dataclass(frozen=True)
class Seen:
    """What a client can see of the cache, and what makes its first token late."""

    computed_tokens: int
    cached_tokens: int


async def test_a_prefix_that_another_tenant_has_sent_is_as_cold_as_one_that_nobody_has(tmp_path: Path) -> None:
    file = tmp_path / "public.txt"
    file.write_text(PUBLIC)
    public = tuple(PUBLIC.encode())
    async with running_cluster(prefill=1, decode=1, model=PACED, public_prefixes=(str(file),)) as cluster:
        client = Client(cluster.grpc)
        await ask(cluster, client, [1] * 40, "first")
        cold, warm, others, salted = [], [], [], []
        for number in range(ROUNDS):
            prompt = [(number * 7919 + position) % 30_000 for position in range(1600)]
            cold.append(await ask(cluster, client, prompt, "acme"))
            others.append(await ask(cluster, client, prompt, "umbrella"))
            warm.append(await ask(cluster, client, prompt, "acme"))
            salted.append(await ask(cluster, client, prompt, "acme", cache_salt="umbrella"))
        assert {seen.cached_tokens for seen in (*cold, *others, *salted)} == {0}
        assert all(seen.cached_tokens >= 1584 for seen in warm)
        assert all(seen.computed_tokens < 1600 / 2 for seen in warm)
        assert all(seen.computed_tokens >= 1600 for seen in (*cold, *others, *salted))
        await ask(cluster, client, [*public, *[7] * 100], "acme")
        for tenant in ("umbrella", ""):
            seen = await ask(cluster, client, [*public, *[7] * 100], tenant)
            assert seen.cached_tokens == len(public) // BLOCK * BLOCK, tenant
        await client.close()


async def ask(
    cluster: ProcessCluster, client: Client, prompt: list[int] | tuple[int, ...], tenant: str, cache_salt: str = ""
) -> Seen:
    before, cached_tokens = computed(cluster), 0
    async for message in client.stream(prompt, tenant=tenant, cache_salt=cache_salt or None, max_tokens=2):
        cached_tokens = message.usage.cached_tokens
    return Seen(round(computed(cluster) - before), cached_tokens)


def computed(cluster: ProcessCluster) -> float:
    return sum(cluster.metric(worker, "twostroke_computed_tokens_total") for worker in cluster.workers)
