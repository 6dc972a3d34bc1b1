"""Rounds by turns, of a router's loop and of a decode worker's streams."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.cluster.processes import Client, running_cluster
from tests.trials.bench.extremes.options import ExtremeOptions
from tests.trials.bench.extremes.router import lateness_s, preparing
from tests.trials.bench.extremes.streams import gaps_s
from tools.output import write_json
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.models.catalog import places

ORDINARY, EXTREME, COMPUTING = "ordinary", "extreme", "ordinary, a process"
"""What a round is beside; the process computes."""
KINDS = (ORDINARY, EXTREME, COMPUTING)
DTYPE = "bfloat16"
SPIN = "import os\nos.nice(10)\nwhile True: pass"
"""A process that computes, as nice as ours that compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Milliseconds of one kind of round; medians over its rounds."""

    part: str
    beside: str
    count: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    delay_p50_ms: float
    """Beyond that of the round beside ordinary ones of the same turn."""
    delay_p99_ms: float


def run_session(options: ExtremeOptions) -> int:
    rows = asyncio.run(measure(options))
    Console(stderr=options.json_path == STDOUT).print(_table(rows))
    told = {"schema_version": 1, "options": options.model_dump(), "rows": [asdict(row) for row in rows]}
    write_json(told, options.json_path)
    return 0


async def measure(options: ExtremeOptions) -> list[Row]:
    model_dir = places.locate(options.model, DTYPE)
    if model_dir is None:
        raise ConfigError(
            f"{options.model} in {DTYPE} is not on this machine; fetch it with `twostroke model pull {options.model}`",
            field="model",
        )
    rows: list[Row] = []
    if options.parts != "worker":
        rows += await _of_router(options, model_dir)
    if options.parts != "router":
        rows += await _of_worker(options, model_dir)
    return rows


async def _of_router(options: ExtremeOptions, model_dir: Path) -> list[Row]:
    async with preparing(model_dir) as prepares:
        return await _rounds(
            "router's loop, late",
            options.rounds,
            lambda is_extreme: lateness_s(prepares, options.seconds, is_extreme=is_extreme),
        )


async def _of_worker(options: ExtremeOptions, model_dir: Path) -> list[Row]:
    async with running_cluster(
        prefill=0,
        decode=1,
        model=ModelConfig(model=options.model, dtype=DTYPE),
        model_dir=model_dir,
        cache=CacheConfig(kv_cache_memory_bytes=512 << 20),
        schedule=ScheduleConfig(max_num_seqs=options.streams + options.beside),
    ) as cluster:
        client = Client(cluster.grpc)
        try:
            return await _rounds(
                "gaps of streams",
                options.rounds,
                lambda is_extreme: gaps_s(
                    client,
                    options.seconds,
                    streams=options.streams,
                    beside=options.beside,
                    is_hostile=is_extreme,
                ),
            )
        finally:
            await client.close()


async def _rounds(part: str, rounds: int, measured: Callable[[bool], Awaitable[list[float]]]) -> list[Row]:
    taken: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]:
            with _computing() if kind == COMPUTING else contextlib.nullcontext():
                taken[kind].append(await measured(kind == EXTREME))
    return [_row(part, kind, taken[kind], taken[ORDINARY]) for kind in KINDS]


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", SPIN]) as process:
        try:
            yield
        finally:
            process.kill()


def _row(part: str, kind: str, rounds: Sequence[list[float]], ordinary: Sequence[list[float]]) -> Row:
    turns = list(zip(rounds, ordinary, strict=True))
    return Row(
        part=part,
        beside=kind,
        count=sum(map(len, rounds)),
        p50_ms=1e3 * statistics.median(map(statistics.median, rounds)),
        p99_ms=1e3 * statistics.median(map(_p99, rounds)),
        longest_ms=1e3 * statistics.median(map(max, rounds)),
        delay_p50_ms=1e3 * statistics.median(statistics.median(one) - statistics.median(other) for one, other in turns),
        delay_p99_ms=1e3 * statistics.median(_p99(one) - _p99(other) for one, other in turns),
    )


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="other streams beside extreme schemas: milliseconds")
    table.add_column("of", no_wrap=True)
    table.add_column("beside", no_wrap=True)
    for column in ("times", "p50", "p99", "most", "p50 +", "p99 +"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        values = (row.p50_ms, row.p99_ms, row.longest_ms, row.delay_p50_ms, row.delay_p99_ms)
        table.add_row(row.part, row.beside, str(row.count), *(f"{value:.1f}" for value in values))
    return table
