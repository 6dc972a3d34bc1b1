"""Every sampling mode while decode workers are killed: the same tokens, text and logprobs, to the last bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.processes import Client, running_cluster
from tests.cluster.requests.deaths import asked_until, kill_the_busiest, undrafted
from tests.metrics_page import total
from twostroke.config import DEFAULT_MODEL, CacheConfig, ModelConfig
from twostroke.models.catalog.fetch import fetch

PROMPT = [504, 3575, 282, 4649, 314, 260, 2240, 282, 1005, 29, 1398, 253, 1343, 327, 354, 28, 284, 1449, 30]
"""Nineteen tokens of ordinary text: one full block and a tail."""
TOKENS = 40
LIVELY: dict[str, object] = {"max_tokens": TOKENS, "ignore_eos": True}
"""Long enough to be broken more than once."""
BROKEN = 3
"""Streams that a kill breaks at least: a third of them, less those that were not placed yet or have ended."""
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.7}

MODES: dict[str, dict[str, object]] = {
    "greedy": LIVELY | {"temperature": 0},
    "drawn": LIVELY | {"temperature": 1.0, "seed": 11},
    "truncated": LIVELY | {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.02, "seed": 12},
    "penalised": LIVELY | PENALTIES | {"temperature": 1.2, "seed": 13},
    "penalised greedy": LIVELY | PENALTIES | {"temperature": 0},
    "biased": LIVELY | {"temperature": 1.0, "logit_bias": {29: 4.0, 30: -4.0}, "seed": 14},
    "logprobs": LIVELY | {"temperature": 0, "logprobs": 5},
    "logprobs of draws": LIVELY | PENALTIES | {"temperature": 0.9, "logprobs": 20, "seed": 15},
    "choices": LIVELY | {"temperature": 1.0, "n": 3, "seed": 16, "logprobs": 1},
    "to its end": {"max_tokens": TOKENS, "temperature": 0.7, "seed": 17},
    "not before": {
        "max_tokens": TOKENS,
        "min_tokens": 24,
        "stop_token_ids": [30, 28, 282],
        "temperature": 0.7,
        "seed": 18,
    },
    "some tokens alone": LIVELY
    | {"temperature": 1.0, "seed": 19, "allowed_token_ids": list(range(5, 400, 3))}
    | {"logprobs": 0, "logprob_token_ids": [7, 5, 30]},
}


@dataclass
class Said:
    """All that a client is told of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[int, float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    finish: str = ""


Answers = dict[str, dict[int, Said]]


async def ask(client: Client, options: Mapping[str, object], prompt: list[int]) -> dict[int, Said]:
    choices: dict[int, Said] = {}
    async for response in client.stream(prompt, **options):
        said = choices.setdefault(response.index, Said())
        said.tokens += response.token_ids
        said.text += response.text
        said.finish = said.finish or response.finish_reason
        for each in response.logprobs:
            top = tuple((other.token_id, other.logprob) for other in each.top)
            said.logprobs.append((each.token_id, each.logprob, top))
    return choices


async def ask_all(client: Client, modes: Mapping[str, Mapping[str, object]]) -> Answers:
    """All at once; their prompts have blocks in common, and two lengths."""
    answers = await asyncio.gather(
        *(ask(client, options, PROMPT * (2 if "logprobs" in options else 1)) for options in modes.values())
    )
    return dict(zip(modes, answers, strict=True))


def stops(text: str) -> list[str]:
    """Texts of several tokens, from one place of the answer after the other."""
    return [text[len(text) * share // 100 :][:20] for share in (30, 45, 60, 75)]


@pytest.mark.parametrize(("dtype", "kills"), [pytest.param("float32", 1, marks=pytest.mark.slow), ("bfloat16", 2)])
async def test_streams_that_move_are_the_same_to_the_last_bit(dtype: str, kills: int, short_model_dir: Path) -> None:
    """The whole model in float32 with --deterministic; a short one in bfloat16, since the native kernels keep it."""
    directory = short_model_dir if dtype == "bfloat16" else fetch(DEFAULT_MODEL, dtype, lambda stage, part: None)
    model = ModelConfig(model=str(directory), dtype=dtype, deterministic=dtype == "float32")
    async with running_cluster(
        prefill=1,
        decode=kills + 1,
        model=model,
        model_dir=directory,
        cache=CacheConfig(kv_cache_memory_bytes=256 << 20),
    ) as cluster:
        client = Client(cluster.grpc)
        expected = await ask_all(client, MODES)
        greedy = expected["greedy"][0]
        assert len({tuple(choice.tokens) for choice in expected["choices"].values()}) == 3, (
            "each choice has its own draws"
        )
        stopped = {stop: MODES["greedy"] | {"stop": [stop]} for stop in stops(greedy.text)}

        modes = undrafted(MODES | stopped)
        are_killed = asyncio.Event()
        asked = asyncio.ensure_future(asked_until(are_killed, lambda: ask_all(client, modes)))
        draw = random.Random(dtype)
        living = {f"decode-{index}" for index in range(kills + 1)}
        for _ in range(kills):
            await kill_the_busiest(cluster, living, draw.randint(10, 40), asked)
        are_killed.set()
        rounds = await asked
        await client.close()

        assert total(cluster.http, "twostroke_reopened_requests_total") >= kills * BROKEN
        for answers in rounds:
            assert {mode for mode in MODES if answers[mode] != expected[mode]} == set()
            for stop in stopped:
                said = answers[stop][0]
                assert (said.text, said.finish) == (greedy.text[: greedy.text.index(stop)], "stop")
                assert said.tokens == greedy.tokens[: len(said.tokens)]
