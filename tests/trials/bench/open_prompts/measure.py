"""Processor time of each worker over the prompts that were answered, for several numbers of open prompts."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.cluster.processes import ProcessCluster, running_cluster
from tests.trials.bench.host_cost.measure import spent
from tests.trials.bench.open_prompts.options import OpenPromptsOptions
from tests.trials.bench.open_prompts.prompts import ANSWER_TOKENS, VOCABULARY, OpenPrompts
from tools.output import write_json
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.rpc.v1 import worker_pb2

PAGE_BYTES = 128
"""Least that a paced model takes for 16 tokens: copies of pages and their digests take no part of a measurement."""
BLOCK_TOKENS = 16
STEP_MS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCost:
    """Processor time in milliseconds per prompt."""

    open: int
    prompts: int
    prefill_ms: float
    """The prefill worker without the thread that runs the model."""
    decode_ms: float
    prompts_per_s: float
    first_token_s: float
    """Median time to the first token."""


def run_session(options: OpenPromptsOptions) -> int:
    rows = [asyncio.run(measure(options, number)) for number in options.numbers]
    Console(stderr=options.json_path == STDOUT).print(_table(options, rows))
    costs = [asdict(row) for row in rows]
    write_json({"schema_version": 1, "options": options.model_dump(), "costs": costs}, options.json_path)
    return 0


async def measure(options: OpenPromptsOptions, number: int) -> OpenCost:
    """Raises PeerLost where a prompt is not answered."""
    blocks = -(-(options.tokens + ANSWER_TOKENS) // BLOCK_TOKENS) + 1
    pace = f"prefill_tokens_per_s={options.tokens_per_s},step_ms={STEP_MS},step_us_per_seq=0"
    shape = f"vocab={VOCABULARY},page_bytes={PAGE_BYTES},max_model_len={options.tokens + 2 * ANSWER_TOKENS}"
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(model=f"paced:{pace},{shape}", served_model_name="paced"),
        cache=CacheConfig(kv_cache_memory_bytes=(number + 1) * blocks * PAGE_BYTES),
        schedule=ScheduleConfig(
            max_num_seqs=number,
            max_num_batched_tokens=max(options.step_tokens, number + 1),
            local_prefill=options.local_prefill,
        ),
    ) as cluster:
        return await _measured(cluster, options, number)


async def _measured(cluster: ProcessCluster, options: OpenPromptsOptions, number: int) -> OpenCost:
    prefill, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
    ours, theirs = _source_of(cluster, "decode-0"), _source_of(cluster, "prefill-0")
    prompts = OpenPrompts(cluster.us, ours, theirs, str(decode.info["fingerprint"]))
    count = max(options.prompts, 2 * number)
    await prompts.connect()
    try:
        await prompts.answer_all(1, 1, options.tokens)
        begun_s = time.perf_counter()
        prompts.first_token_s.clear()
        with spent(prefill.process.pid) as prefill_s, spent(decode.process.pid) as decode_s:
            await prompts.answer_all(count, number, options.tokens)
            elapsed_s = time.perf_counter() - begun_s
    finally:
        await prompts.close()
    return OpenCost(
        open=number,
        prompts=count,
        prefill_ms=1e3 * prefill_s[0] / count,
        decode_ms=1e3 * decode_s[0] / count,
        prompts_per_s=count / elapsed_s,
        first_token_s=statistics.median(prompts.first_token_s),
    )


def _source_of(cluster: ProcessCluster, name: str) -> worker_pb2.PageSource:
    info = cluster.workers[name].info
    return worker_pb2.PageSource(worker_id=name, address=str(info["address"]), epoch=str(info["epoch"]))


def _table(options: OpenPromptsOptions, rows: list[OpenCost]) -> Table:
    table = Table(title=f"processor time per prompt of {options.tokens} tokens, steps of {options.step_tokens}")
    for column in ("open", "prompts", "prefill worker ms", "decode worker ms", "prompts/s", "first token s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.open),
            str(row.prompts),
            f"{row.prefill_ms:.1f}",
            f"{row.decode_ms:.1f}",
            f"{row.prompts_per_s:.2f}",
            f"{row.first_token_s:.2f}",
        )
    return table
