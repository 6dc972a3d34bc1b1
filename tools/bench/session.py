"""One run from flags to report: plan, connect, warm up, load, measure, print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

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
    console = Console(stderr=options.json_path == STDOUT)
    print_report(report, describe(options), console)
    if hint := advice(report, options):
        console.print(f"hint: {hint}")
    write_json(as_json(report, options), options.json_path)
    return 0 if report.completed else 1


def plan_of(options: Options) -> list[PlannedRequest]:
    work = options.workload
    if work.trace is None:
        return synthetic_plan(work, arrivals_of(options.arrivals, options.rate, work.num_requests, work.seed))
    replay = Replay(
        jitter_s=work.trace_jitter_s,
        time_scale=work.trace_scale,
        length_scale=work.trace_length_scale,
        seed=work.seed,
    )
    trace = replayed(read_trace(work.trace, work.trace_limit), replay)
    if options.rate is None and options.concurrency is None:
        return trace_plan(trace, [row.timestamp_s for row in trace.rows])
    return trace_plan(trace, arrivals_of(options.arrivals, options.rate, len(trace.rows), work.seed))


async def measure(options: Options, plan: Sequence[PlannedRequest]) -> Report:
    allow_many_sockets()
    client = await connect(options.target, options.workload.seed, options.workload.vocab_size)
    try:
        lanes = options.concurrency or 1
        await fixed_concurrency(client, warmup_plan(plan, options.warmup), lanes, lambda record: None)
        with progress(len(plan), time.perf_counter) as on_record:
            measured = await run_plan(client, plan, options.concurrency, on_record)
    finally:
        await client.close()
    return summarise(measured.records, measured.client_cpu_s)
