"""Every sampling mode with speculation on, off, and on workers that differ and are killed: the same to the last bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.cluster.processes import Client, running_cluster
from tests.cluster.requests.test_exact_resume import MODES, ask_all, busiest
from tests.cluster.requests.test_grammars import GRAMMARS, HOW
from tests.draft_models import save_first_layers
from twostroke.config import (
    DEFAULT_MODEL,
    DRAFT_MODEL,
    DRAFTER_NAMES,
    GRAMMAR_DRAFTER,
    SPECULATE_AUTO,
    SPECULATE_OFF,
    CacheConfig,
    ModelConfig,
    ScheduleConfig,
)
from twostroke.models.catalog.fetch import fetch

STRUCTURED = {
    f"{grammar}, logprobs, {how}": {
        "structured_output": GRAMMARS[grammar],
        "max_tokens": 160,
        "logprobs": 3,
        **HOW[how],
    }
    for grammar in GRAMMARS
    for how in ("greedy", "drawn")
}
"""Grammars force many of these tokens, and each has its logprobs."""
LOOP = {"max_tokens": 96, "ignore_eos": True, "temperature": 0}
"""A small model that goes on greedily soon repeats itself."""


@pytest.mark.parametrize(
    ("kv_format", "drafters"),
    [(None, ()), *(pytest.param(kv_format, DRAFTER_NAMES, marks=pytest.mark.slow) for kv_format in (None, "int4"))],
)
async def test_speculation_changes_no_bit_of_any_answer(
    tmp_path: Path, kv_format: str | None, drafters: tuple[str, ...]
) -> None:
    directory = fetch(DEFAULT_MODEL, "bfloat16", lambda stage, part: None)
    draft_model = str(save_first_layers(directory, tmp_path / "draft"))
    modes = MODES | STRUCTURED | {"loop": LOOP, "loop with penalties": LOOP | {"frequency_penalty": 0.01}}
    answers = {}
    for speculate in (SPECULATE_OFF, SPECULATE_AUTO, *drafters):
        async with running_cluster(
            prefill=1,
            decode=2,
            model=ModelConfig(dtype="bfloat16"),
            model_dir=directory,
            cache=CacheConfig(kv_cache_memory_bytes=256 << 20, kv_format=kv_format),
            schedule=ScheduleConfig(
                speculate=speculate,
                draft_model=draft_model if speculate in (SPECULATE_AUTO, DRAFT_MODEL) else None,
            ),
        ) as cluster:
            client = Client(cluster.grpc)
            first = await ask_all(client, modes)
            asked = asyncio.ensure_future(ask_all(client, modes))
            victim = await busiest(cluster, {"decode-0", "decode-1"}, random.Random(1).randint(20, 80))
            await cluster.kill(victim)
            again = await asked
            (left,) = {"decode-0", "decode-1"} - {victim}
            drafted, kept = (
                cluster.metric(left, f"twostroke_speculation_{name}_tokens_total") for name in ("drafted", "kept")
            )
            await client.close()
        answers[speculate] = first
        assert again == first
        if speculate == DRAFT_MODEL:  # a poor one, which its price may forbid
            assert drafted >= kept
        elif speculate == GRAMMAR_DRAFTER:
            assert drafted == kept > 0
        else:
            assert (drafted > kept > 0) == (speculate != SPECULATE_OFF)
    for speculate, said in answers.items():
        assert {mode for mode in modes if said[mode] != answers[SPECULATE_OFF][mode]} == set(), speculate
