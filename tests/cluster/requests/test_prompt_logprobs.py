"""Logprobs of prompts from real processes: those of transformers, whatever is cached and whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.lent import lent
from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.cluster.requests.deaths import asked_until
from tests.cluster.requests.test_adapter_identity import small_llama
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig

DECODE = ("decode-0", "decode-1")
BY_24 = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=24)
"""The longest prompt takes many steps, so that a worker can die between them."""
ROUNDING = 2e-4
"""Logprobs of float32 differ by so much at most between implementations, and between cuts into chunks."""


@dataclass(frozen=True, slots=True)
class Scored:
    name: str
    prompt: tuple[int, ...]


@pytest.fixture(scope="module")
def prompts() -> list[Scored]:
    """Lengths around a block's border, and one of several chunks."""
    draw = np.random.default_rng(0)
    return [Scored(f"length {length}", tuple(draw.integers(1, 131, length).tolist())) for length in (1, 16, 17, 230)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(directory: Path, prompts: list[Scored]) -> dict[str, list[float]]:
    """What one forward pass over each whole prompt gives its tokens after the first."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = {}
    with torch.inference_mode():
        for each in prompts:
            logprobs = model(torch.tensor([each.prompt])).logits[0, :-1].log_softmax(-1)
            found[each.name] = logprobs[range(len(each.prompt) - 1), each.prompt[1:]].tolist()
    return found


async def scored(http: str, prompt: tuple[int, ...], **options: object) -> dict[str, Any]:
    body = {"prompt": list(prompt), "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0, **options}
    async with httpx.AsyncClient(timeout=300) as client:
        answer = await client.post(f"{http}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def scored_at_once(http: str, prompt: tuple[int, ...]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(scored(http, prompt) for _ in range(4)))


def check(choice: dict[str, Any], each: Scored, expected: dict[str, list[float]]) -> None:
    first, *logprobs = choice["logprobs"]["token_logprobs"][: len(each.prompt)]
    assert first is None
    np.testing.assert_allclose(logprobs, expected[each.name], atol=ROUNDING)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(directory: Path) -> AsyncIterator[ProcessCluster]:
    model, cache = ModelConfig(model=str(directory), dtype="float32"), CacheConfig(kv_cache_memory_bytes=4 << 20)
    async with running_cluster(
        prefill=1, decode=2, model=model, model_dir=directory, cache=cache, schedule=BY_24
    ) as started:
        yield started


@pytest.mark.asyncio(loop_scope="module")
async def test_they_are_those_of_transformers_and_caches_do_not_change_them(
    shared: ProcessCluster, prompts: list[Scored], expected: dict[str, list[float]]
) -> None:
    async with lent(shared) as cluster:
        client = Client(cluster.grpc)
        for each in prompts:
            check(await scored(cluster.http, each.prompt), each, expected)
        pulled = sum(cluster.metric(worker, "twostroke_pull_bytes_total") for worker in DECODE)
        assert pulled == 0, "they are computed where they are sampled"
        for each in prompts:
            await client.tokens(each.prompt, max_tokens=2, temperature=0)
        again = await asyncio.gather(*(scored(cluster.http, each.prompt, max_tokens=3) for each in prompts))
        for each, choice in zip(prompts, again, strict=True):
            check(choice, each, expected)
            assert len(choice["logprobs"]["tokens"]) == len(each.prompt) + 3
        over_grpc = [
            message async for message in client.stream(prompts[0].prompt * 20, prompt_logprobs=2, ignore_eos=True)
        ]
        assert [len(message.prompt_logprobs) for message in over_grpc] == [19] + [0] * (len(over_grpc) - 1)
        await client.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_has_the_logprob_that_its_last_tokens_had_when_they_were_drawn(
    shared: ProcessCluster, prompts: list[Scored]
) -> None:
    async with lent(shared) as cluster:
        each = next(each for each in prompts if each.name == "length 17")
        drawn = await scored(cluster.http, each.prompt, max_tokens=16, return_token_ids=True)
        whole = await scored(cluster.http, (*each.prompt, *drawn["token_ids"]))
        lengths = [len(choice["logprobs"]["tokens"]) for choice in (drawn, whole)]
        assert lengths == [len(each.prompt) + 16] * 2
        pairs = [choice["logprobs"]["token_logprobs"][1:] for choice in (drawn, whole)]
        np.testing.assert_allclose(*pairs, atol=ROUNDING)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_decode_worker_that_is_killed_while_it_scores_changes_nothing(
    shared: ProcessCluster, prompts: list[Scored], expected: dict[str, list[float]]
) -> None:
    longest = max(prompts, key=lambda each: len(each.prompt))
    async with lent(shared) as cluster:
        is_killed = asyncio.Event()
        asked = asyncio.ensure_future(asked_until(is_killed, lambda: scored_at_once(cluster.http, longest.prompt)))
        victim = await first_to_run(cluster, asked)
        await cluster.kill(victim)
        is_killed.set()
        for choices in await asked:
            for choice in choices:
                check(choice, longest, expected)
        await cluster.restart(victim)


async def first_to_run(cluster: ProcessCluster, asked: asyncio.Future[Any]) -> str:
    while True:
        for worker in DECODE:
            if (await cluster.load(worker)).running:
                return worker
        assert not asked.done()
        await asyncio.sleep(0.005)
