"""A seeded request draws the same tokens alone, among sixteen, and across a decode worker's death (float32)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster.processes import Client, running_cluster
from twostroke.config import CacheConfig, ModelConfig

PROMPT = [504, 3575, 282, 4649, 314, 260, 2240, 282, 1005, 29, 1398, 253, 1343, 327, 354, 28, 284, 1449, 30]
"""Nineteen tokens of ordinary text: one full block and a tail."""

MODES: dict[str, dict[str, object]] = {
    "plain": {"temperature": 1.0, "seed": 11},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.02, "seed": 12},
    "penalised": {
        "temperature": 1.2,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "seed": 13,
    },
    "biased": {"temperature": 1.0, "logit_bias": {29: 4.0, 30: -4.0}, "min_tokens": 40, "seed": 14},
}
TOKENS = 48


async def answer(client: Client, mode: str) -> list[int]:
    return await client.tokens(PROMPT, max_tokens=TOKENS, **MODES[mode])


async def test_seeded_tokens_do_not_depend_on_company_or_on_which_worker_lives(smollm2_dir: Path) -> None:
    async with running_cluster(
        prefill=1,
        decode=2,
        model=ModelConfig(dtype="float32"),
        model_dir=smollm2_dir,
        cache=CacheConfig(kv_cache_memory_bytes=256 << 20),
    ) as cluster:
        client = Client(cluster.grpc)
        alone = {mode: await answer(client, mode) for mode in MODES}
        assert len({tuple(tokens) for tokens in alone.values()}) == len(MODES)

        others = [
            client.tokens([token, *PROMPT], max_tokens=TOKENS, temperature=1.0, seed=token) for token in range(100, 112)
        ]
        crowd = await asyncio.gather(*(answer(client, mode) for mode in MODES), *others)
        assert dict(zip(MODES, crowd, strict=False)) == alone

        asked = [asyncio.ensure_future(answer(client, mode)) for mode in MODES for _ in range(2)]
        before = {name: cluster.metric(name, "twostroke_sampled_tokens_total") for name in ("decode-0", "decode-1")}
        victim = await _first_to_sample(cluster.metric, before)
        await cluster.kill(victim)
        answers = await asyncio.gather(*asked)
        assert answers == [alone[mode] for mode in MODES for _ in range(2)]
        await client.close()


async def _first_to_sample(metric: object, before: dict[str, float]) -> str:
    """The worker that has drawn some tokens of the running answers, but not all."""
    while True:
        for name, count in before.items():
            if metric(name, "twostroke_sampled_tokens_total") >= count + 8:  # type: ignore[operator]
                return name
        await asyncio.sleep(0.01)


async def test_choices_of_one_request_differ_and_repeat(smollm2_dir: Path) -> None:
    async with running_cluster(
        prefill=1, decode=1, model=ModelConfig(dtype="float32"), model_dir=smollm2_dir
    ) as cluster:
        client = Client(cluster.grpc)

        async def choices() -> dict[int, list[int]]:
            tokens: dict[int, list[int]] = {}
            async for response in client.stream(PROMPT, n=3, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True):
                tokens.setdefault(response.index, []).extend(response.token_ids)
            return tokens

        first = await choices()
        assert sorted(first) == [0, 1, 2]
        assert len({tuple(tokens) for tokens in first.values()}) == 3
        assert await choices() == first
        await client.close()
