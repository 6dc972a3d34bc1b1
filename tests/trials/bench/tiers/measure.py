"""Chats on a cluster of one prefill and one decode worker: time to first token, hit rate, what the tiers did."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.clients.admin_access import AdminAccess
from cluster.commands.looking.profile import write
from cluster.profiles.collecting import collect
from tests.cluster.processes import TOKEN, Client, ProcessCluster, running_cluster
from tests.metrics_page import total
from tests.trials.bench.tiers.options import TiersOptions
from tests.trials.bench.tiers.replay import replayed
from tools.output import write_json
from tools.simulate.fit.core_fit import ProfiledStep, steps_of
from tools.simulate.fit.likeness import SINCE_DECISION, Likeness, print_likeness
from tools.tables import console_for
from twostroke.config import DEFAULT_MODEL, PACED_PREFIX, CacheConfig, ModelConfig
from twostroke.engine.backends.paced.runner import PacedSpec
from twostroke.models.catalog.fetch import fetch
from twostroke.models.known_specs import known_spec

BLOCK = 16
SYSTEM_PROMPTS = 4
LARGE_BYTES = 4 << 30
"""Room for everything."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the client saw it."""

    turn: int
    """0 for a chat's first turn, and for a prompt that nobody repeats."""
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    gaps_s: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    variant: str
    seconds: float
    """Time of all turns of all chats."""
    median_s: float
    """Median time to first token from the second turn on."""
    hit_rate: float
    """Cached tokens over prompt tokens, from the second turn on."""
    gap_p99_s: float
    unique_median_s: float
    unique_gap_p99_s: float
    unique_seconds: float
    loaded: dict[str, float]
    """Pages that were loaded, by tier."""
    written_mb: dict[str, float]
    saved_s: float
    given_up: float
    answers: tuple[tuple[int, ...], ...]
    """The tokens of all answers, for a comparison between variants."""
    likeness: Likeness | None
    """The simulator beside it, where that was asked for."""


def run_session(options: TiersOptions) -> int:
    trials = [asyncio.run(_trial(options, variant)) for variant in options.variants]
    console = console_for(options.json_path, COLUMNS)
    _show(trials, console)
    alike = [trial.likeness for trial in trials if trial.likeness is not None]
    if alike:
        print_likeness(alike, SINCE_DECISION, console)
    if options.json_path is not None:
        write_json({"trials": [asdict(trial) for trial in trials]}, options.json_path)
    return 0


async def _trial(options: TiersOptions, variant: str) -> Trial:
    model = ModelConfig() if options.model is None else ModelConfig(model=options.model)
    model_dir, page_bytes = fetched(model)
    with tempfile.TemporaryDirectory() as folder:
        cache, request_log = cache_of(options, variant, page_bytes, folder), Path(folder) / "requests.log"
        async with running_cluster(
            prefill=1, decode=1, model=model, model_dir=model_dir, cache=cache, request_log=request_log
        ) as cluster:
            client = Client(cluster.grpc)
            started_s = time.monotonic()
            first_turn_over = asyncio.Event()
            profiling = asyncio.create_task(_profiled(cluster, options.profile_s, first_turn_over))
            chats = await _chats(client, options, first_turn_over)
            steps = await profiling
            seconds = time.monotonic() - started_s
            started_s = time.monotonic()
            unique = await _unique(client, options)
            unique_seconds = time.monotonic() - started_s
            await client.close()
            counted = await asyncio.to_thread(_counted, cluster)
            # While all workers serve: the log's last lines of workers that end say that.
            likeness = (
                await asyncio.to_thread(replayed, variant, request_log, cache, steps) if options.simulate else None
            )
    return _summed(variant, chats, seconds, unique, unique_seconds, counted, likeness)


def fetched(model: ModelConfig) -> tuple[Path | None, int]:
    """Returns the model's directory, if it has one, and the bytes of a page."""
    if model.is_paced:
        return None, PacedSpec.parse(model.model.removeprefix(PACED_PREFIX)).page_bytes_for(BLOCK)
    model_dir = fetch(model.model or DEFAULT_MODEL, model.dtype, lambda stage, part: None)
    return model_dir, known_spec(model_dir, None).page_bytes(BLOCK, model.dtype)


def cache_of(options: TiersOptions, variant: str, page_bytes: int, folder: str) -> CacheConfig:
    tokens = SYSTEM_PROMPTS * options.system + options.chats * options.turns * (options.said + options.answer)
    pool_bytes = LARGE_BYTES if variant == "all-pages" else tokens // BLOCK // options.share * page_bytes
    return CacheConfig(
        kv_cache_memory_bytes=pool_bytes,
        host_cache_bytes=LARGE_BYTES // 2 if variant in ("host", "both") else 0,
        disk_cache_bytes=LARGE_BYTES if variant in ("disk", "both") else 0,
        disk_cache_dir=folder,
        prefill_kv_format=options.prefill_kv_format,
        decode_kv_format=options.decode_kv_format,
    )


async def _profiled(cluster: ProcessCluster, seconds: float | None, begin: asyncio.Event) -> list[list[ProfiledStep]]:
    """Returns the steps of each worker for so many seconds after the event; none where no time is given."""
    if seconds is None:
        return []
    await begin.wait()
    profiles = await asyncio.to_thread(collect, AdminAccess((cluster.admin,), TOKEN), seconds)
    with io.StringIO() as file:
        write(profiles, file)
        return steps_of(json.loads(file.getvalue())["traceEvents"])


async def _chats(client: Client, options: TiersOptions, first_turn_over: asyncio.Event) -> list[Request]:
    """Every chat's first turn, then every chat's second one, and so on: nothing recent is of use."""
    draws, at_once = random.Random(1), asyncio.Semaphore(options.at_once)
    systems = [words(draws, options.system) for _ in range(SYSTEM_PROMPTS)]
    histories = [list(systems[chat % SYSTEM_PROMPTS]) for chat in range(options.chats)]
    requests: list[Request] = []

    async def say(chat: int, turn: int, said: Sequence[int]) -> None:
        async with at_once:
            histories[chat] += said
            request = await ask(client, histories[chat], turn, options.answer)
            histories[chat] += request.tokens
            requests.append(request)

    for turn in range(options.turns):
        saying = [words(draws, options.said) for _ in range(options.chats)]
        await asyncio.gather(*(say(chat, turn, saying[chat]) for chat in range(options.chats)))
        first_turn_over.set()
    return requests


async def _unique(client: Client, options: TiersOptions) -> list[Request]:
    draws, at_once = random.Random(2), asyncio.Semaphore(2)

    async def send(prompt: list[int]) -> Request:
        async with at_once:
            return await ask(client, prompt, 0, options.answer)

    length = options.system + 2 * options.said
    return list(await asyncio.gather(*(send(words(draws, length)) for _ in range(options.unique))))


async def ask(client: Client, prompt: Sequence[int], turn: int, answer: int) -> Request:
    tokens: list[int] = []
    times: list[float] = []
    cached, started_s = 0, time.monotonic()
    async for response in client.stream(prompt, max_tokens=answer, ignore_eos=True, temperature=0.0):
        if response.token_ids:
            tokens += response.token_ids
            times.append(time.monotonic())
        if response.HasField("usage"):
            cached = response.usage.cached_tokens
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
    return Request(turn, len(prompt), cached, times[0] - started_s, gaps, tuple(tokens))


def words(draws: random.Random, count: int) -> list[int]:
    return [draws.randrange(100, 40_000) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _Counted:
    loaded: dict[str, float]
    written_mb: dict[str, float]
    saved_s: float
    given_up: float


def _counted(cluster: ProcessCluster) -> _Counted:
    def summed(name: str, **labels: str) -> float:
        return sum(
            total(str(worker.info["metrics_address"]), f"twostroke_tier_{name}", **labels)
            for worker in cluster.workers.values()
        )

    tiers = ("host", "disk")
    return _Counted(
        {tier: summed("loaded_pages_total", tier=tier) for tier in tiers},
        {tier: summed("written_bytes_total", tier=tier) / 1e6 for tier in tiers},
        summed("saved_seconds_total") - summed("lost_seconds_total"),
        summed("given_up_loads_total"),
    )


def _summed(
    variant: str,
    chats: list[Request],
    seconds: float,
    unique: list[Request],
    unique_seconds: float,
    counted: _Counted,
    likeness: Likeness | None,
) -> Trial:
    later = [request for request in chats if request.turn]
    return Trial(
        variant=variant,
        seconds=seconds,
        median_s=statistics.median(request.first_token_s for request in later),
        hit_rate=sum(request.cached_tokens for request in later) / sum(request.prompt_tokens for request in later),
        gap_p99_s=p99([gap for request in chats for gap in request.gaps_s]),
        unique_median_s=statistics.median(request.first_token_s for request in unique) if unique else 0.0,
        unique_gap_p99_s=p99([gap for request in unique for gap in request.gaps_s]),
        unique_seconds=unique_seconds,
        loaded=counted.loaded,
        written_mb=counted.written_mb,
        saved_s=counted.saved_s,
        given_up=counted.given_up,
        answers=tuple(sorted(request.tokens for request in chats)),
        likeness=likeness,
    )


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0


COLUMNS = 150
"""The table's width where no terminal says one."""


def _show(trials: Sequence[Trial], console: Console) -> None:
    first = trials[0]
    columns = (
        "variant", "chats s", "TTFT ms", "of first", "hits", "gap p99 ms", "unique TTFT ms", "unique gap p99 ms",
        "unique s", "loaded", "written MB", "saved s", "same tokens",
    )  # fmt: skip
    table = Table(*columns, title="chats and tiers", caption="TTFT: median from the second turn on")
    for trial in trials:
        table.add_row(
            trial.variant,
            f"{trial.seconds:.1f}",
            f"{1e3 * trial.median_s:.0f}",
            f"{trial.median_s / first.median_s:.2f}",
            f"{trial.hit_rate:.1%}",
            f"{1e3 * trial.gap_p99_s:.1f}",
            f"{1e3 * trial.unique_median_s:.0f}",
            f"{1e3 * trial.unique_gap_p99_s:.1f}",
            f"{trial.unique_seconds:.1f}",
            "/".join(f"{pages:.0f}" for pages in trial.loaded.values()),
            "/".join(f"{size:.0f}" for size in trial.written_mb.values()),
            f"{trial.saved_s:.1f}",
            f"{sum(a == b for a, b in zip(trial.answers, first.answers, strict=True)) / len(first.answers):.0%}",
        )
    console.print(table)
