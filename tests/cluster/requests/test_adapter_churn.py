"""Adapters that are loaded, replaced and unloaded under load: every answer is that of a version that was served.

`make adapters` plays the same at full length with a model that really computes.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from tests.lora import random_tensors, write_adapter
from tests.trials.chaos.adapters.calls import Calls
from tests.trials.chaos.adapters.churn import Churn, Prompt, Stage
from tests.trials.chaos.adapters.fleet import BASE, churned, fleet

PACED = "paced:step_ms=2,max_model_len=512,page_bytes=1024"
NAMES, SERVED, VERSIONS, SECONDS = 12, 8, 10, 4.0
KEPT = "4"
"""Adapters that a worker keeps: half of what is served."""
PROMPTS: list[Prompt] = [tuple(random.Random(number).choices(range(200), k=70)) for number in range(3)]


async def test_no_answer_is_another_versions_while_adapters_come_and_go(tmp_path: Path) -> None:
    loras = tmp_path / "loras"
    with fleet(tmp_path, loras, "--model", PACED, "--kv-cache-memory", "1M", "--max-loras", KEPT) as (server, calls):
        churn = Churn(paced_stage(calls, loras), calls, seed=3, pause_s=0.3)
        seen, counted = await churned(server, churn, SECONDS, kills=False)
    assert seen.wrong == []
    assert min(seen.answers, seen.of_base, seen.not_found, seen.cached_tokens) > 0
    assert min(seen.loads, seen.replacements, seen.unloads, counted.evictions) > 0
    assert counted.failures == 0


def paced_stage(calls: Calls, loras: Path) -> Stage:
    """Asks for the answer of each version under a name that nobody else uses."""
    writers = {f"v{seed}": partial(write_adapter, tensors=random_tensors(seed=seed)) for seed in range(VERSIONS)}
    expected = {(BASE, prompt): calls.ask(BASE, prompt).tokens for prompt in PROMPTS}
    for version, write in writers.items():
        write(loras / version)
        calls.load(version, str(loras / version))
        expected |= {(version, prompt): calls.ask(version, prompt).tokens for prompt in PROMPTS}
        calls.unload(version)
    assert len(set(expected.values())) == len(expected)
    return Stage(BASE, [f"name{number}" for number in range(NAMES)], SERVED, writers, expected, loras)
