"""Processor time of router and decode worker over the tokens that came meanwhile, for several numbers of streams."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.cluster.processes import PATIENCE_S, ProcessCluster, running_cluster
from tests.trials.bench.host_cost.options import HostCostOptions
from tests.trials.bench.host_cost.streams import GrpcStreams, HttpStreams, Streams, until_all_run
from tools.bench.connect import allow_many_sockets
from tools.output import write_json
from twostroke.base.errors import PeerLost
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.engine.loop import THREAD_NAME

PAGE_BYTES = 128
BLOCK_TOKENS = 16
SPARE_S = 60.0
"""Time for which an answer must last beside the measurement: while streams are opened the others run."""
STEPS_BEFORE = 10
"""Steps between the first token of the last stream and the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Processor time in microseconds per token."""

    streams: int
    tokens_per_s: float
    router_us: float
    worker_us: float
    """The decode worker without the thread that runs the model."""
    router_share: float
    """Processor time of the router over time: at 1.0 one core is full."""


def run_session(options: HostCostOptions) -> int:
    allow_many_sockets()
    rows = [asyncio.run(measure(options, number)) for number in options.numbers]
    Console(stderr=options.json_path == STDOUT).print(_table(options, rows))
    costs = [asdict(row) for row in rows]
    write_json({"schema_version": 1, "options": options.model_dump(), "costs": costs}, options.json_path)
    return 0


async def measure(options: HostCostOptions, number: int) -> HostCost:
    """Returns the median of all rounds. Raises PeerLost where the streams do not all run."""
    most_tokens = int((options.rounds * options.seconds + SPARE_S) * 1000 / options.step_ms)
    pages = number * (2 + most_tokens // BLOCK_TOKENS)
    model = ModelConfig(
        model=f"paced:step_ms={options.step_ms},step_us_per_seq=0,prefill_tokens_per_s=1000000,page_bytes={PAGE_BYTES}",
        served_model_name="paced",
    )
    async with running_cluster(
        prefill=1,
        decode=1,
        model=model,
        cache=CacheConfig(kv_cache_memory_bytes=pages * PAGE_BYTES),
        schedule=ScheduleConfig(max_num_seqs=number, max_waiting=2 * number, speculate=options.speculate),
    ) as cluster:
        streams: Streams = (
            GrpcStreams(cluster.grpc) if options.protocol == "grpc" else HttpStreams(cluster.routers[0].http)
        )
        try:
            await until_all_run(streams, number, most_tokens, PATIENCE_S)
            await asyncio.sleep(STEPS_BEFORE * options.step_ms / 1000)
            rounds = [await _round(cluster, streams, options.seconds) for _ in range(options.rounds)]
        finally:
            await streams.close()
    return HostCost(
        streams=number,
        tokens_per_s=statistics.median(each.tokens_per_s for each in rounds),
        router_us=statistics.median(each.router_us for each in rounds),
        worker_us=statistics.median(each.worker_us for each in rounds),
        router_share=statistics.median(each.router_share for each in rounds),
    )


async def _round(cluster: ProcessCluster, streams: Streams, seconds: float) -> HostCost:
    counted = streams.counted
    router, worker = cluster.routers[0].process.pid, cluster.workers["decode-0"].process.pid
    before, before_s = counted.tokens, time.perf_counter()
    with spent(router) as router_s, spent(worker) as worker_s:
        await asyncio.sleep(seconds)
        tokens, elapsed_s = counted.tokens - before, time.perf_counter() - before_s
    if counted.ended or not tokens:
        raise PeerLost(counted.ended or "no token came")
    return HostCost(
        streams=counted.begun,
        tokens_per_s=tokens / elapsed_s,
        router_us=1e6 * router_s[0] / tokens,
        worker_us=1e6 * worker_s[0] / tokens,
        router_share=router_s[0] / elapsed_s,
    )


@contextmanager
def spent(pid: int) -> Iterator[list[float]]:
    """Yields a list that has the processor seconds of a process's threads at the end, but for the engine's."""
    spent: list[float] = []
    before = _thread_seconds(pid)
    yield spent
    spent.append(_thread_seconds(pid) - before)


def _thread_seconds(pid: int) -> float:
    threads = psutil.Process(pid).threads()
    return float(sum(each.user_time + each.system_time for each in threads if not _is_engine(pid, each.id)))


def _is_engine(pid: int, thread: int) -> bool:
    return Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip() == THREAD_NAME


def _table(options: HostCostOptions, rows: list[HostCost]) -> Table:
    table = Table(
        title=f"processor time per token over {options.protocol}, one token a stream each {options.step_ms:g} ms"
    )
    for column in ("streams", "tokens/s", "router us", "decode worker us", "router, share of a core"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.streams),
            f"{row.tokens_per_s:.0f}",
            f"{row.router_us:.1f}",
            f"{row.worker_us:.1f}",
            f"{row.router_share:.2f}",
        )
    return table
