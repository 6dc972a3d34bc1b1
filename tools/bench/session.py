"""One run from flags to report: plan, connect, warm up, load, measure, print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cluster.flags.checks import STDOUT
from tools.bench.connect import allow_many_sockets, connect
from tools.bench.drive import fixed_concurrency, run_plan
from tools.bench.load import (
    PlannedRequest,
    arrivals_of,
    synthetic_plan,
    trace_plan,
    warmup_plan,
)
from tools.bench.measure import Report, summarise
from tools.bench.options import Options
from tools.bench.progress import progress
from tools.bench.report import advice, as_json, describe, print_report
from tools.output import write_json
from tools.simulate.traces.trace import Replay, read_trace, replayed


def run_session(options: Options) -> int:
    """Exit code: 1 if every request failed."""
    plan = plan_of(options)
    report = asyncio.run(measure(options, plan))
    console = Console(stderr=options.pace.json_path == STDOUT)
    print_report(report, describe(options), console)
    if hint := advice(report, options):
        console.print(f"hint: {hint}")
    write_json(as_json(report, options), options.pace.json_path)
    return 0 if report.completed else 1


def plan_of(options: Options) -> list[PlannedRequest]:
    pace, said, seed = options.pace, options.replay, options.prompts.seed
    if said.trace is None:
        return synthetic_plan(options.prompts, arrivals_of(pace.arrivals, pace.rate, pace.num_requests, seed))
    replay = Replay(
        jitter_s=said.trace_jitter_s,
        time_scale=said.trace_scale,
        length_scale=said.trace_length_scale,
        seed=seed,
    )
    trace = replayed(read_trace(Path(said.trace), said.trace_limit), replay)
    if pace.rate is None and pace.concurrency is None:
        return trace_plan(trace, [row.timestamp_s for row in trace.rows])
    return trace_plan(trace, arrivals_of(pace.arrivals, pace.rate, len(trace.rows), seed))


async def measure(options: Options, plan: Sequence[PlannedRequest]) -> Report:
    allow_many_sockets()
    client = await connect(options.target, options.prompts.seed, options.prompts.vocab_size)
    try:
        lanes = options.pace.concurrency or 1
        await fixed_concurrency(client, warmup_plan(plan, options.pace.warmup), lanes, lambda record: None)
        with progress(len(plan), time.perf_counter) as on_record:
            measured = await run_plan(client, plan, options.pace.concurrency, on_record)
    finally:
        await client.close()
    return summarise(measured.records, measured.client_cpu_s)
