"""Prompts that nobody repeats, on two clusters that serve side by side: what a tier costs those whom it cannot help.

Two prompts at once go to one cluster, then the same two to the other, and the order changes with every round. So a
machine that is busy for a while is busy for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from tests.cluster.processes import Client, running_cluster
from tests.trials.bench.tiers.measure import COLUMNS, Request, ask, cache_of, fetched, p99, words
from tests.trials.bench.tiers.options import TiersOptions
from tools.output import write_json
from tools.tables import console_for
from twostroke.config import ModelConfig

AT_ONCE = 2
"""Prompts of a round: one is computed while the other one's tokens are generated."""


@dataclass(slots=True)
class _Side:
    variant: str
    client: Client
    requests: list[Request] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Time of each round."""


def run_in_turns(options: TiersOptions) -> int:
    sides = asyncio.run(_measure(options))
    rows = [_row(side) for side in sides]
    ratios = {name: rows[1][name] / rows[0][name] for name in rows[0]}
    table = Table("", *(side.variant for side in sides), "ratio", title=f"{options.unique} prompts that nobody repeats")
    for name, ratio in ratios.items():
        table.add_row(name, *(f"{row[name]:.4f}" for row in rows), f"{ratio:.3f}")
    console_for(options.json_path, COLUMNS).print(table)
    if options.json_path is not None:
        write_json({"variants": [side.variant for side in sides], "rows": rows, "ratios": ratios}, options.json_path)
    return 0


async def _measure(options: TiersOptions) -> list[_Side]:
    model = ModelConfig() if options.model is None else ModelConfig(model=options.model)
    model_dir, page_bytes = fetched(model)
    draws, length = random.Random(2), options.system + 2 * options.said
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for variant in options.variants[:2]:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            cache = cache_of(options, variant, page_bytes, folder)
            cluster = await stack.enter_async_context(
                running_cluster(
                    prefill=1, decode=1, model=model, model_dir=model_dir, cache=cache,
                    request_log=Path(folder) / "requests.log",
                )
            )  # fmt: skip
            sides.append(_Side(variant, Client(cluster.grpc)))
        for number in range(options.unique // AT_ONCE):
            prompts = [words(draws, length) for _ in range(AT_ONCE)]
            for side in sides if number % 2 else reversed(sides):
                await _round(side, prompts, options.answer)
        for side in sides:
            await side.client.close()
    return sides


async def _round(side: _Side, prompts: Sequence[list[int]], answer: int) -> None:
    started_s = time.monotonic()
    side.requests += await asyncio.gather(*(ask(side.client, prompt, 0, answer) for prompt in prompts))
    side.seconds.append(time.monotonic() - started_s)


def _row(side: _Side) -> dict[str, float]:
    return {
        "time to first token, median s": statistics.median(request.first_token_s for request in side.requests),
        "gap between tokens, p99 s": p99([gap for request in side.requests for gap in request.gaps_s]),
        "a round, median s": statistics.median(side.seconds),
        "all rounds s": sum(side.seconds),
    }
