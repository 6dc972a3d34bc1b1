"""`python -m tests.trials.bench prompts`: what a prompt costs a router, new and as the next turn of a chat.

A router and two paced workers run as processes, with the tokenizer of the default model. Each chat is streamed over
HTTP, one after the other. Its cost is the processor time of the router and of its processes from the request to the
end of the answer, by the kernel's clock of each thread.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from cluster.flags.checks import file_can_be_made
from tests.cluster.processes import running_cluster
from tests.prepare import fetched_model
from tests.trials.bench.options import json_file
from tools.output import write_json
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.config import CacheConfig, EndpointsConfig, ModelConfig, flags
from twostroke.config.settings import Settings, group, setting

PACE = "paced:prefill_tokens_per_s=2000000,step_ms=1,vocab=49152,page_bytes=4096,max_model_len=131072"
WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "which")
TURNS = 10
SETTLED_S = 0.05
"""Time after an answer in which its end is seen to."""

Messages = list[dict[str, str]]
Ask = Callable[[Messages], Awaitable["Cost"]]


class PromptsOptions(Settings):
    chars: int = setting(220_000, least=TURNS * 100, help="characters of the long prompt, and of a chat's ten turns")
    rounds: int = setting(7, least=1, help="requests of each kind, of which the median counts")
    kept: int = setting(64 << 20, least=0, unit="BYTES", help="--text-cache-bytes of the router")
    json_path: str | None = json_file()

    def model_post_init(self, _context: object) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: PromptsOptions = group(PromptsOptions, "prompts")


@dataclass(frozen=True, slots=True)
class Cost:
    router_ms: float
    processes_ms: float
    """Milliseconds of the processes that read and tokenize requests."""
    first_token_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags."""
    options = flags.read(_Flags, args).options
    found = asyncio.run(_measured(options))
    grid = text_grid(
        ("prompt", "router, ms", "its processes, ms", "first token, ms"),
        [
            text_row(name, f"{cost.router_ms:.1f}", f"{cost.processes_ms:.1f}", f"{cost.first_token_ms:.0f}")
            for name, cost in found.items()
        ],
    )
    console_for(options.json_path).print(table_of(grid, "processor time of one streamed chat"))
    write_json({name: dataclasses.asdict(cost) for name, cost in found.items()}, options.json_path)
    return 0


async def _measured(options: PromptsOptions) -> dict[str, Cost]:
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(model=PACE, served_model_name="paced"),
        model_dir=fetched_model(),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 30),
        endpoints=EndpointsConfig(text_cache_bytes=options.kept),
    ) as cluster:
        router = psutil.Process(cluster.routers[0].process.pid)
        async with httpx.AsyncClient(base_url=cluster.http, timeout=600) as http:
            return await _costs(options, lambda messages: _cost(http, router, messages))


async def _costs(options: PromptsOptions, ask: Ask) -> dict[str, Cost]:
    draw, found = random.Random(time.time_ns()), dict[str, Cost]()
    for chars in (1000, options.chars):
        await ask([_said("user", chars, draw)])
        costs = [await ask([_said("user", chars, draw)]) for _ in range(options.rounds)]
        found[f"{chars:,} characters, new"] = _median(costs)
    turns = [await _turns(ask, options.chars // TURNS, draw) for _ in range(options.rounds)]
    for turn in (0, TURNS - 1):
        name = f"turn {turn + 1} of a chat with {options.chars // TURNS:,} characters in each"
        found[name] = _median([costs[turn] for costs in turns])
    return found


async def _turns(ask: Ask, chars: int, draw: random.Random) -> list[Cost]:
    messages, costs = Messages(), list[Cost]()
    for _ in range(TURNS):
        messages.append(_said("user", chars - chars // 40, draw))
        costs.append(await ask(messages))
        messages.append(_said("assistant", chars // 40, draw))
    return costs


def _median(costs: Sequence[Cost]) -> Cost:
    columns = zip(*map(dataclasses.astuple, costs), strict=True)
    return Cost(*map(statistics.median, columns))


async def _cost(http: httpx.AsyncClient, router: psutil.Process, messages: Messages) -> Cost:
    body = {"model": "paced", "messages": messages, "max_tokens": 4, "ignore_eos": True, "stream": True}
    before, processes_before, began_s = _spent_ms(router), _children_ms(router), time.perf_counter()
    first_s: float | None = None
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if first_s is None and '"content":"' in line:
                first_s = time.perf_counter()
    assert first_s is not None, "the answer has no token"
    await asyncio.sleep(SETTLED_S)
    return Cost(_spent_ms(router) - before, _children_ms(router) - processes_before, (first_s - began_s) * 1e3)


def _children_ms(router: psutil.Process) -> float:
    return sum(map(_spent_ms, router.children(recursive=True)))


def _spent_ms(process: psutil.Process) -> float:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def _said(role: str, chars: int, draw: random.Random) -> dict[str, str]:
    words = [f"Case {draw.randrange(10**9)}:"]
    size = len(words[0])
    while size < chars:
        words.append(draw.choice(WORDS) + (str(draw.randrange(1000)) if draw.random() < 0.05 else ""))
        size += len(words[-1]) + 1
    return {"role": role, "content": " ".join(words)[:chars]}
