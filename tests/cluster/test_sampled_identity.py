"""The choices of a seeded request (float32); see test_exact_resume for streams that move."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.processes import Client, running_cluster
from twostroke.config import ModelConfig

PROMPT = [504, 3575, 282, 4649, 314, 260, 2240, 282, 1005, 29, 1398, 253, 1343, 327, 354, 28, 284, 1449, 30]
"""Nineteen tokens of ordinary text: one full block and a tail."""


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
