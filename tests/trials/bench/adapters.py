"""`python -m tests.trials.bench adapters`: what adapters cost a served load, beside the same load for the model alone.

One cluster of a prefill and a decode worker serves the model and some random adapters on all projections. Rounds of the
same load go to the model alone and to the adapters in turns, so that a machine that is busy for a while is busy for
both. Prompts are new in every round. With as many requests at once as adapters, every row of a step has one of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from cluster.flags.checks import file_can_be_made
from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.lora import random_tensors, write_adapter
from tests.trials.bench.options import json_file
from tools.output import write_json
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.config import DEFAULT_MODEL, CacheConfig, ModelConfig, flags
from twostroke.config.settings import Settings, group, setting
from twostroke.models.adapters.peft import read_adapter
from twostroke.models.adapters.shapes import ProjectionShapes
from twostroke.models.catalog.fetch import fetch
from twostroke.models.registry import read_spec

BASE = ""
"""The name of the model alone in a request."""
TOKEN_IDS = range(1000, 30000)
"""Prompts are drawn from these: ordinary tokens of the default model."""


class AdapterBenchOptions(Settings):
    model: str = setting(DEFAULT_MODEL, help="as `serve --model`, in bfloat16")
    adapters: int = setting(8, least=1, help="adapters, asked for in turn")
    rank: int = setting(16, least=1, most=512, help="rank of each")
    concurrency: int = setting(8, least=1, help="requests at once")
    prompt_tokens: int = setting(256, least=1, help="length of prompts")
    output_tokens: int = setting(64, least=1, help="length of outputs")
    requests: int = setting(3, least=1, help="requests one after the other in each lane of a round")
    rounds: int = setting(6, least=1, help="rounds of each, after one of each that is not measured")
    json_path: str | None = json_file()

    def model_post_init(self, _context: object) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: AdapterBenchOptions = group(AdapterBenchOptions, "adapters")


@dataclass(slots=True)
class Side:
    name: str
    models: tuple[str, ...]
    """Names that requests ask for in turn."""
    tokens_per_s: list[float] = field(default_factory=list)
    """Output tokens per second of each round."""
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags."""
    options = flags.read(_Flags, args).options
    sides = asyncio.run(_measure(options))
    rows = [_row(side) for side in sides]
    ratios = {name: rows[1][name] / rows[0][name] for name in rows[0]}
    pairs = zip(sides[1].tokens_per_s, sides[0].tokens_per_s, strict=True)
    of_rounds = [ours / base for ours, base in pairs]
    grid = text_grid(
        ("", *(side.name for side in sides), "ratio"),
        [text_row(name, *(f"{row[name]:.4g}" for row in rows), f"{ratio:.3f}") for name, ratio in ratios.items()],
    )
    title = f"{options.adapters} adapters of rank {options.rank}, {options.concurrency} requests at once"
    console = console_for(options.json_path)
    console.print(table_of(grid, title))
    console.print(f"throughput of adapters over none: {statistics.geometric_mean(of_rounds):.3f} "
          f"(rounds {min(of_rounds):.3f} to {max(of_rounds):.3f})")  # fmt: skip
    sides_json = {side.name: row for side, row in zip(sides, rows, strict=True)}
    write_json({"sides": sides_json, "ratios": ratios, "ratios_of_rounds": of_rounds}, options.json_path)
    return 0


async def _measure(options: AdapterBenchOptions) -> tuple[Side, Side]:
    directory = fetch(options.model, "bfloat16", lambda stage, part: None)
    longest = options.prompt_tokens + options.output_tokens
    page_bytes = read_spec(directory).page_bytes(16, "bfloat16")
    pages = 4 * options.concurrency * (longest // 16 + 1)
    draws = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = await stack.enter_async_context(
            running_cluster(
                prefill=1,
                decode=1,
                model=ModelConfig(model=options.model),
                model_dir=directory,
                cache=CacheConfig(kv_cache_memory_bytes=pages * page_bytes),
            )
        )
        client = Client(cluster.grpc)
        stack.push_async_callback(client.close)
        sides = (Side("none", (BASE,)), Side("adapters", await _serve(cluster, directory, folder, options)))
        for number in range(options.rounds + 1):
            for side in sides if number % 2 else reversed(sides):
                await _round(client, side, options, draws, is_measured=number > 0)
    return sides


async def _serve(
    cluster: ProcessCluster, directory: Path, folder: Path, options: AdapterBenchOptions
) -> tuple[str, ...]:
    """Returns the names of adapters on all projections."""
    shapes = ProjectionShapes.of(read_spec(directory))
    names = tuple(f"adapter{number}" for number in range(options.adapters))
    for seed, name in enumerate(names):
        tensors = random_tensors(shapes, rank=options.rank, seed=seed, size=0.01)
        written = write_adapter(folder / name, tensors, r=options.rank)
        await cluster.name_adapter(name, read_adapter(written), written)
    return names


async def _round(
    client: Client, side: Side, options: AdapterBenchOptions, draws: random.Random, *, is_measured: bool
) -> None:
    """Lanes of requests side by side, each with a model of its own as long as there are as many."""
    first_token_s: list[float] = []
    gaps_s: list[float] = []

    async def lane(model: str) -> None:
        for _ in range(options.requests):
            prompt = draws.choices(TOKEN_IDS, k=options.prompt_tokens)
            times = [time.monotonic()]
            asked = {"model": model, "max_tokens": options.output_tokens, "temperature": 0, "ignore_eos": True}
            async for response in client.stream(prompt, **asked):
                times += [time.monotonic()] * len(response.token_ids)
            assert len(times) == options.output_tokens + 1
            first_token_s.append(times[1] - times[0])
            gaps_s.extend(end - begin for begin, end in itertools.pairwise(times[1:]))

    models = itertools.islice(itertools.cycle(side.models), options.concurrency)
    started_s = time.monotonic()
    await asyncio.gather(*map(lane, models))
    seconds = time.monotonic() - started_s
    if is_measured:
        side.tokens_per_s.append(options.concurrency * options.requests * options.output_tokens / seconds)
        side.first_token_s += first_token_s
        side.gaps_s += gaps_s


def _row(side: Side) -> dict[str, float]:
    return {
        "output tokens/s, median round": statistics.median(side.tokens_per_s),
        "time to first token, median s": statistics.median(side.first_token_s),
        "gap between tokens, median s": statistics.median(side.gaps_s),
        "gap between tokens, p99 s": statistics.quantiles(side.gaps_s, n=100)[98],
    }
